"""A small pool of confined children: each does one job at a time, and is killed where that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec
import structlog

from services.tokenizer.confined.frames import PREFIX, UNSENDABLE, to_frame
from shared.errors import FatalError, RejectCode, RequestError
from shared.processes.idle_time import LEAST_URGENT, confine_to_idle_time
from shared.processes.proc import own_seconds, stat, wants_to_run

log = structlog.get_logger()

T = TypeVar("T")

LEAST_REST = 0.1  # seconds: less is no rest
START_TIMEOUT = 30.0  # seconds for a child to come up ...
START_SECONDS = 10.0  # ... and of a processor: what had less by then is kept waiting by a busy machine
RESTART_PAUSE = 1.0  # seconds before another try
NUM_SLICES = 4  # of every wait: a process that was frozen meanwhile, child or parent, has lost one of them and not all
LONGEST = 10  # times its limit, for a child that wants to run and does not get to
ROOT = Path(__file__).parents[3]


class LateChildError(Exception):
    """The child took too long, and is no more."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for which it had a processor; infinite where that is unknown."""
        super().__init__(seconds)
        self.seconds = seconds


class BrokenChildError(Exception):
    """The child broke its limits, and is no more."""


class ChildPool(Generic[T]):
    """Runs a module that reads a setup, then jobs, and answers each (`services.tokenizer.confined.confinement`).

    Invariant: a child in `_idle` has no work under way.  A child whose answer did not come in time, or made no sense,
    is killed and another takes its place; so one job costs at most `timeout` of one child, as long as both are awake.
    A child that had next to no processor in that time is not slow, but kept waiting: it goes on for a while.
    """

    module: ClassVar[str]  # that a child runs
    field: ClassVar[str]  # what a child does with what, for refusals
    action: ClassVar[str]
    # Of the children once they are up, since requests wait for the first ones; of replacements, from their start, which
    # with the least urgent one take idle time only.
    niceness: ClassVar[int] = 0
    least_seconds: ClassVar[float] = 0.0  # of a processor, which a job has had before it can be late

    def __init__(
        self,
        setup: msgspec.Struct,
        probe: msgspec.Struct,
        answers: type[T],
        *,
        timeout: float,
        max_answer_bytes: int,
        num_children: int,
        patience: float | None = None,
    ) -> None:
        """`patience`: seconds that a job waits for a child; as long as it may take itself, where that is not said."""
        self.timeout = timeout
        self.patience = timeout if patience is None else patience
        self.num_killed = 0
        self._resting: dict[Process, asyncio.TimerHandle] = {}
        self._setup = to_frame(setup)
        self._probe = probe
        self._answers = msgspec.json.Decoder(answers)
        self._max_answer_bytes = max_answer_bytes
        self._num_children = num_children
        self._idle: asyncio.Queue[Process] = asyncio.Queue()  # each taker gives it work or puts it back
        self._children: set[Process] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._all_reaped = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the children that are missing, and wait until each is ready.  Raises FatalError where one does not come
        up; the others stay."""
        missing = (self._add_child() for _ in range(self._num_children - len(self._children)))
        outcomes = await asyncio.gather(*missing, return_exceptions=True)
        if (failure := next((outcome for outcome in outcomes if outcome is not None), None)) is not None:
            raise failure

    async def started(self) -> None:
        """Start the children with the first job: most deployments never have one.  Raises RequestError where they do
        not come up."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self.start())
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except FatalError as error:
            if self._starting is starting:  # no other that waited has begun anew
                self._starting = None
            raise RequestError(str(error), code=RejectCode.UNAVAILABLE) from error

    async def close(self) -> None:
        """Kill all children, those that are just coming up too.  A job under way has no answer, and its child is reaped
        by the task that waits for it."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        self._closed = True
        for child in self._children:
            _end(child)
        await asyncio.gather(*self._replacing)
        for child, timer in list(self._resting.items()):
            timer.cancel()
            self._rested(child)
        while not self._idle.empty():
            await self._reap(self._idle.get_nowait())
        if self._children:
            await self._all_reaped.wait()

    async def ask(self, job: msgspec.Struct, allowance: float = 1.0) -> T:
        """A child's answer to a job, which may wait and take `allowance` times the usual.  Raises RequestError."""
        try:
            async with awake(allowance * self.patience):
                child = await self._idle.get()
            return await self.work(child, job, allowance * self.timeout)
        except TimeoutError:
            waited = f"{allowance * self.patience:g} s"
            raise self._not_now(f"no process became free to {self.action} it within {waited}") from None
        except LateChildError as late:
            if late.seconds < self.least_seconds:
                raise self._not_now(f"its process got only {late.seconds:.2f} s of processor time") from None
            raise self.refusal(f"takes more than {allowance * self.timeout:g} s to {self.action}") from None
        except BrokenChildError:
            raise self.refusal(f"takes too much memory or processor time to {self.action}") from None

    def refusal(self, reason: str) -> RequestError:
        """The job is at fault."""
        return RequestError(f"{self.field} {reason}", field=self.field)

    def _not_now(self, reason: str) -> RequestError:
        """The machine is."""
        wait = int(1000 * self.timeout)
        return RequestError(f"{self.field}: {reason}", code=RejectCode.UNAVAILABLE, retry_after_ms=wait)

    async def work(self, child: Process, job: msgspec.Struct, seconds: float, longest: float = LONGEST) -> T:
        """Its answer to a job, within so many seconds, `longest` times as many where it is kept waiting."""
        try:
            frame = to_frame(job)
        except UNSENDABLE as error:  # the child has seen nothing of it
            self.release(child)
            raise self.refusal(f"cannot be read: {error}") from None
        answer, begun = None, stat(child.pid)
        try:
            async with awake(seconds, lambda: _is_kept_waiting(child, begun, self.least_seconds), longest):
                answer = await self._exchange(child, frame)
        except TimeoutError:
            raise LateChildError(_spent(begun, stat(child.pid))) from None
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            raise BrokenChildError from None
        finally:
            if answer is not None:
                self.release(child, self.rest_after(answer))
            else:
                self._replace(child)
        return answer

    def rest_after(self, answer: T) -> float:
        """Seconds for which a child rests after this, so that a costly job leaves time to others."""
        return 0.0

    def release(self, child: Process, rest: float = 0.0) -> None:
        """It has no work any more, and is free after so many seconds."""
        if rest < LEAST_REST or self._closed:
            self._idle.put_nowait(child)
        else:
            self._resting[child] = asyncio.get_running_loop().call_later(rest, self._rested, child)

    def _rested(self, child: Process) -> None:
        del self._resting[child]
        self._idle.put_nowait(child)

    async def _exchange(self, child: Process, frame: bytes) -> T:
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        child.stdin.write(frame)
        await child.stdin.drain()
        (size,) = PREFIX.unpack(await child.stdout.readexactly(PREFIX.size))
        if size > self._max_answer_bytes:
            raise BrokenChildError
        return self._answers.decode(await child.stdout.readexactly(size))

    def _replace(self, child: Process) -> None:
        self.num_killed += 1
        if not self._closed:
            log.warning("child_replaced", module=self.module, pid=child.pid)
        task = asyncio.get_running_loop().create_task(self._replace_now(child))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace_now(self, child: Process) -> None:
        await self._reap(child)
        while not self._closed:
            try:
                await self._add_child(is_replacement=True)
                return
            except FatalError as error:
                log.error("child_not_started", module=self.module, reason=str(error))
                await asyncio.sleep(RESTART_PAUSE)

    async def _add_child(self, *, is_replacement: bool = False) -> None:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self.module),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            raise FatalError(f"no process for {self.module}: {error}") from error
        self._children.add(child)
        self._all_reaped.clear()
        if is_replacement:  # no request waits for this one alone
            self._give_way(child)
            if self.niceness == LEAST_URGENT:
                with contextlib.suppress(OSError):
                    confine_to_idle_time(child.pid)
        try:
            await self._come_up(child)
        except (BrokenChildError, TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            await self._reap(child)
            raise FatalError(f"a process of {self.module} does not answer") from error
        self._give_way(child)
        self._idle.put_nowait(child)

    def _give_way(self, child: Process) -> None:
        with contextlib.suppress(OSError):  # gone already, or not allowed: then it is as urgent as all
            os.setpriority(os.PRIO_PROCESS, child.pid, self.niceness)

    async def _come_up(self, child: Process) -> None:
        """A job of nothing asks whether the child is up, so that the first real one does not pay for its imports."""
        assert child.stdin is not None  # a pipe
        child.stdin.write(self._setup)
        begun = stat(child.pid)
        async with awake(START_TIMEOUT, lambda: _is_kept_waiting(child, begun, START_SECONDS)):
            await self._exchange(child, to_frame(self._probe))

    async def _reap(self, child: Process) -> None:
        """Kill a child whose output is not read any more."""
        _end(child)
        if child.stdin is not None:
            child.stdin.close()
        # Reading to the end lets the pipe close; a plain wait would leave it open where output is unread.
        await child.communicate()
        self._children.discard(child)
        if not self._children:
            self._all_reaped.set()


def _is_kept_waiting(child: Process, begun: list[str] | None, least_seconds: float) -> bool:
    """Whether it would run if it had a processor, and had one for less than so many seconds so far."""
    now = stat(child.pid)
    return now is not None and wants_to_run(now) and _spent(begun, now) < least_seconds


def _spent(begun: list[str] | None, now: list[str] | None) -> float:
    """Seconds of a processor in between; infinite where that is unknown."""
    return own_seconds(now) - own_seconds(begun) if begun and now else math.inf


@asynccontextmanager
async def awake(
    seconds: float, may_go_on: Callable[[], bool] = lambda: False, longest: float = LONGEST
) -> AsyncIterator[None]:
    """As asyncio.timeout, but time in which the event loop stood still counts as one slice at most; and while
    `may_go_on`, there are more slices, up to `longest` times as many."""
    loop, timer = asyncio.get_running_loop(), list[asyncio.Handle]()
    async with asyncio.timeout(None) as limit:

        def next_slice(num_slices: int) -> None:
            if num_slices < NUM_SLICES or (num_slices < longest * NUM_SLICES and may_go_on()):
                timer[:] = [loop.call_later(seconds / NUM_SLICES, next_slice, num_slices + 1)]
            else:
                limit.reschedule(loop.time())

        next_slice(0)
        try:
            yield
        finally:
            timer[0].cancel()


def _end(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
