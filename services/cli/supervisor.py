"""Keeps a set of services alive: restarts what dies, gives up on what cannot work, and stops all in order.

It knows neither processes nor the clock: both are given, so that tests need neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

EXIT_CONFIG = 78  # EX_CONFIG: starting again would not help
FIRST_DELAY = 0.5  # seconds before the first restart; doubles with every early death
MAX_DELAY = 30.0
LONG_LIFE = 30.0  # after a life as long as this the delay begins anew
KILL_AFTER = 2.0  # beyond the drain timeout
POLL = 0.02


class Process(Protocol):
    def poll(self) -> int | None:
        """The exit status, or None while it lives."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Role(msgspec.Struct, frozen=True):
    """One process to keep alive: replica `index` of a service."""

    service: str
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.service}-{self.index}"


class Child:
    """A role and whoever plays it now."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.process: Process | None = None
        self.started = 0.0
        self.restart_at = 0.0
        self.delay = FIRST_DELAY
        self.num_deaths = 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Invariant: every role is played by one live process, or waits for its restart, until `stop` or `failure`."""

    def __init__(
        self,
        roles: Iterable[Role],
        start: Callable[[Role], Process],
        *,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.children = [Child(role) for role in roles]
        self.failure: tuple[Role, int] | None = None  # who cannot work, and its exit status
        self._start = start
        self._report = report
        self._clock = clock
        self._sleep = sleep

    def start(self) -> None:
        """Start every role at once."""
        for child in self.children:
            self._begin(child)

    def poll(self) -> None:
        """See who died, restart whose time has come."""
        for child in self.children:
            if child.process is None:
                if self._clock() >= child.restart_at:
                    self._begin(child)
            elif (status := child.process.poll()) is not None:
                self._bury(child, status)

    def stop(self, drain_timeout: float) -> None:
        """Ask the gateways to drain, then the others, so that open streams can end; kill who stays."""
        gateways = [child for child in self.children if child.role.service == "gateway"]
        others = [child for child in self.children if child not in gateways]
        for group in (gateways, others):
            self._stop_group(group, drain_timeout + KILL_AFTER)

    def _begin(self, child: Child) -> None:
        child.process = self._start(child.role)
        child.started = self._clock()

    def _bury(self, child: Child, status: int) -> None:
        child.process = None
        child.num_deaths += 1
        if status == EXIT_CONFIG:
            self.failure = (child.role, status)
            return
        if self._clock() - child.started >= LONG_LIFE:
            child.delay = FIRST_DELAY
        child.restart_at = self._clock() + child.delay
        self._report(f"{child.role.name} ended with status {status}; starting again in {child.delay:g} s")
        child.delay = min(2 * child.delay, MAX_DELAY)

    def _stop_group(self, group: list[Child], patience: float) -> None:
        for child in group:
            if child.process is not None and child.alive:
                child.process.terminate()
        deadline = self._clock() + patience
        while any(child.alive for child in group) and self._clock() < deadline:
            self._sleep(POLL)
        for child in group:
            if child.process is not None and child.alive:
                self._report(f"{child.role.name} did not stop in time: killed")
                child.process.kill()
