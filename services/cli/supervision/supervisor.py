"""Keeps a set of services alive: restarts what dies, gives up on what cannot work, replaces one after the other, and
stops all in order.

It knows neither processes nor the clock: both are given, so that tests need neither.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from services.cli.command_line.help import COUNT, FROM_0, Shown
from shared.processes.exit_status import EXIT_CONFIG

FIRST_DELAY = 0.1  # seconds before the first restart; doubles with every early death
MAX_DELAY = 30.0
LONG_LIFE = 30.0  # after a life as long as this the delay begins anew
KILL_AFTER = 2.0  # beyond the time that a process has to leave
LEAVE, STOP = signal.SIGUSR1, signal.SIGTERM  # one, while the others stay; all
POLL = 0.02
ORDER = ("detokenizer", "tokenizer", "draft", "store", "worker", "scheduler", "gateway")
OVERLAPPING = frozenset({"detokenizer", "tokenizer", "gateway"})  # small enough to be there twice for a while
COMPUTING = ("worker", "draft")  # the services that hold a model in memory
READY_SECONDS = 120.0  # that a successor has to be ready
LOAD_SECONDS = 600.0  # the same, where it has a model to load


class Process(Protocol):
    def poll(self) -> int | None:
        """The exit status, or None while it lives."""

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


class Role(msgspec.Struct, frozen=True):
    """One process to keep alive: replica `index` of a service."""

    service: str
    index: int = 0
    model: str = ""  # which it is of; empty: the first, or all

    @property
    def name(self) -> str:
        name = f"{self.service}-{self.index}"
        return f"{self.model}/{name}" if self.model else name


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes of each service `pageant serve` starts."""

    workers: Annotated[int, Shown("Worker replicas.", COUNT)] = 1
    drafts: Annotated[int, Shown("Draft replicas, unless --draft is off.", COUNT)] = 1
    stores: Annotated[int, Shown("Store replicas, where --store-memory is given.", COUNT)] = 1
    tokenizers: Annotated[int, Shown("Tokenizer replicas.", COUNT)] = 1
    detokenizers: Annotated[int, Shown("Detokenizer replicas.", COUNT)] = 1
    gateways: Annotated[int, Shown("Gateway replicas, at ports in a row.", COUNT)] = 1
    prefill: Annotated[int, Shown("Workers that compute prompts for the others.", FROM_0)] = 0
    decode: Annotated[int, Shown("Workers that go on with them. With both, --workers counts for nothing.", FROM_0)] = 0

    @property
    def worker_roles(self) -> list[str]:
        """Of the first workers, which have one."""
        return ["prefill"] * self.prefill + ["decode"] * self.decode

    @property
    def num_workers(self) -> int:
        return len(self.worker_roles) + (0 if self.prefill and self.decode else self.workers)


@dataclass(eq=False)
class ChildProcess:
    """A role and the process that has it now."""

    role: Role
    process: Process | None = None
    started: float = 0.0
    restart_at: float = 0.0
    delay: float = 0.0  # before the next restart; 0: it has not died early yet
    num_deaths: int = 0
    num_lives: int = 0
    kill_at: float | None = None  # it was asked to leave, and must have done so by then
    is_replaced: bool = False  # once it has left, in the same role

    @property
    def is_leaving(self) -> bool:
        return self.kill_at is not None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """0 where there is no process, or none yet."""
        return getattr(self.process, "pid", 0) if self.alive else 0


class Supervisor:
    """Invariant: every role has one live process, or waits for its restart, until it is dismissed, or until `stop` or
    `failure`."""

    def __init__(
        self,
        roles: Iterable[Role],
        start: Callable[[Role], Process],
        *,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = 60.0 + KILL_AFTER,
        max_delay: float = MAX_DELAY,
    ) -> None:
        """`patience`: seconds that one process has to leave when the others stay."""
        self.children = [ChildProcess(role) for role in roles]
        self.failure: tuple[Role, int] | None = None  # the process that cannot work, and its exit status
        self.given_up: dict[str, Role] = {}  # by model beside the first: the process of it that cannot work
        self._start = start
        self._report = report
        self._clock = clock
        self._sleep = sleep
        self._patience = patience
        self._max_delay = max_delay

    def start(self) -> None:
        """Start every role at once."""
        for child in self.children:
            self._begin(child)

    def poll(self) -> None:
        """Note processes that have ended, and start those whose restart is due."""
        for child in list(self.children):
            if child.process is None:
                if self._clock() >= child.restart_at:
                    self._begin(child)
            elif (status := child.process.poll()) is not None:
                if child.is_leaving:
                    self._part(child)
                else:
                    self._bury(child, status)
            elif child.kill_at is not None and self._clock() >= child.kill_at:
                self._kill(child)

    def cast(self, service: str, model: str | None = "") -> list[ChildProcess]:
        """The replicas of a service that stay, in the order of their indices; of all models where it is None."""
        found = [child for child in self.children if child.role.service == service and not child.is_leaving]
        found = [child for child in found if model in (None, child.role.model)]
        return sorted(found, key=lambda child: (child.role.model, child.role.index))

    def scale(self, service: str, count: int, model: str = "") -> None:
        """Have `count` replicas of a service: start missing ones, ask the last ones to leave."""
        present = self.cast(service, model)
        taken = {child.role.index for child in present}
        for index in [index for index in range(count) if index not in taken][: max(0, count - len(present))]:
            self.engage(Role(service, index, model))
        for child in present[count:]:
            self.dismiss(child)

    def engage(self, role: Role) -> ChildProcess:
        """Start one more process, also for a role that another process is about to leave."""
        child = ChildProcess(role)
        self.children.append(child)
        self._begin(child)
        return child

    def dismiss(self, child: ChildProcess, *, replace: bool = False) -> None:
        """Ask one to leave, for good or to be replaced; it is killed if it does not leave in time."""
        if child.process is None:
            if not replace and child in self.children:  # else it was given up
                self.children.remove(child)
            return
        child.is_replaced = replace
        child.kill_at = self._clock() + self._patience
        child.process.send_signal(LEAVE)

    def stop(self, drain_timeout: float) -> None:
        """Ask the gateways to drain, then the others, so that open streams can end; kill those that do not end."""
        gateways = [child for child in self.children if child.role.service == "gateway"]
        others = [child for child in self.children if child not in gateways]
        for group in (gateways, others):
            self._stop_group(group, drain_timeout + KILL_AFTER)

    def _begin(self, child: ChildProcess) -> None:
        child.started = self._clock()
        try:
            child.process = self._start(child.role)
        except OSError as error:  # no process, memory, descriptor or disk to be had now
            self._start_later(child)
            self._report(f"{child.role.name} cannot be started: {error}; trying again in {child.delay:g} s")
        else:
            child.num_lives += 1

    def _part(self, child: ChildProcess) -> None:
        child.kill_at = None
        child.process = None
        if child.is_replaced:
            child.is_replaced = False
            self._begin(child)
        else:
            self.children.remove(child)

    def _bury(self, child: ChildProcess, status: int) -> None:
        child.process = None
        child.num_deaths += 1
        if status == EXIT_CONFIG:
            self._give_up(child, status)
            return
        self._start_later(child)
        self._report(f"{child.role.name} ended with status {status}; starting again in {child.delay:g} s")

    def _start_later(self, child: ChildProcess) -> None:
        had_long_life = self._clock() - child.started >= LONG_LIFE
        child.delay = FIRST_DELAY if had_long_life or not child.delay else min(2 * child.delay, self._max_delay)
        child.restart_at = self._clock() + child.delay

    def _give_up(self, child: ChildProcess, status: int) -> None:
        """What would end so again and again is not started again.  Where its service has others, they go on: it may
        have been refused for not computing as they do."""
        if any(other is not child for other in self.cast(child.role.service, child.role.model)):
            self.children.remove(child)
            self._report(f"{child.role.name} cannot work beside the others of its service, and is given up")
        elif child.role.model:  # the other models go on
            self.children.remove(child)
            self.given_up[child.role.model] = child.role
            self._report(f"{child.role.name} cannot work, and is given up")
        else:
            self.failure = (child.role, status)

    def _stop_group(self, group: list[ChildProcess], patience: float) -> None:
        for child in group:
            if child.process is not None and child.alive:
                child.process.send_signal(STOP)
        self._wait_for(group, patience)
        for child in group:
            self._kill(child)
        self._wait_for(group, KILL_AFTER)  # also those that were killed: nothing of theirs is left behind then

    def _wait_for(self, group: list[ChildProcess], patience: float) -> None:
        deadline = self._clock() + patience
        while any(child.alive for child in group) and self._clock() < deadline:
            self._sleep(POLL)

    def _kill(self, child: ChildProcess) -> None:
        if child.process is not None and child.alive:
            self._report(f"{child.role.name} did not stop in time: killed")
            child.process.kill()


class OrderFailedError(Exception):
    """An order could not be carried out; the text says why."""


def rolling_restart(
    supervisor: Supervisor,
    services: Iterable[str],
    is_ready: Callable[[ChildProcess], bool],
    *,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> Iterator[None]:
    """Replace every process of these services; to be advanced between the supervisor's polls.

    Raises OrderFailedError where a successor is not ready in time; the processes that are not replaced yet stay.
    """
    for service in [service for service in ORDER if service in set(services)]:
        for child in supervisor.cast(service, None):
            begun = clock()
            replace = _overlap if service in OVERLAPPING else _succeed
            yield from replace(supervisor, child, is_ready, clock)
            report(f"{child.role.name} was replaced in {clock() - begun:.1f} s")


def _overlap(
    supervisor: Supervisor, child: ChildProcess, is_ready: Callable[[ChildProcess], bool], clock: Callable[[], float]
) -> Iterator[None]:
    """The successor is ready before its predecessor leaves."""
    successor = supervisor.engage(child.role)
    is_ready_by_now = _in_time(is_ready, clock)
    try:
        while not is_ready_by_now(successor):
            if successor not in supervisor.children:
                raise OrderFailedError(f"the next {child.role.name} cannot work beside its predecessor, which stays")
            yield
    except OrderFailedError:
        supervisor.dismiss(successor)
        raise
    supervisor.dismiss(child)
    while child in supervisor.children:
        yield


def _succeed(
    supervisor: Supervisor, child: ChildProcess, is_ready: Callable[[ChildProcess], bool], clock: Callable[[], float]
) -> Iterator[None]:
    """The predecessor leaves first: there is no room for two, or no place.  The successor's time begins then."""
    life = child.num_lives
    supervisor.dismiss(child, replace=True)
    while child.is_leaving:
        yield
    is_ready_by_now = _in_time(lambda child: child.num_lives > life and is_ready(child), clock)
    while not is_ready_by_now(child):
        if child not in supervisor.children:
            raise OrderFailedError(f"the next {child.role.name} cannot work, and is given up")
        yield


def _in_time(is_ready: Callable[[ChildProcess], bool], clock: Callable[[], float]) -> Callable[[ChildProcess], bool]:
    """`is_ready`, but it raises OrderFailedError where that is not so in time, which begins now."""
    begun = clock()

    def is_ready_by_now(child: ChildProcess) -> bool:
        ready, seconds = is_ready(child), LOAD_SECONDS if child.role.service in COMPUTING else READY_SECONDS
        if not ready and clock() - begun > seconds:
            raise OrderFailedError(f"the next {child.role.name} was not ready within {seconds:g} s")
        return ready

    return is_ready_by_now
