"""Executes the work of an actor that computes, and sends the answers to the scheduler: in a thread, at the call, or
on the event loop in between."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import structlog

from shared.errors import ProtocolError
from shared.messages import Message
from shared.processes.idle_time import give_way
from shared.transport import Outbox, Transport

log = structlog.get_logger()

W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)

SLICE = 0.02  # seconds that the event loop computes at a time


class Computation(Protocol[W_contra]):
    """What is computed.  Only one thread uses it."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to compute of the work so far."""

    def apply(self, work: W_contra) -> None:
        """Take work, and compute nothing yet.  Raises ProtocolError where the work is malformed."""

    def turn(self) -> Sequence[Message]:
        """Compute one piece of the work; returns the answers that are ready."""


class Executor(Protocol[W_contra]):
    """Takes work from an actor.  `failure` is the error that ended it, if one did."""

    failure: BaseException | None

    def submit(self, work: W_contra) -> None: ...

    def close(self) -> None: ...


class InlineExecutor(Generic[W]):
    """Computes all of the work within `submit`: for cheap work, and for tests in one thread."""

    def __init__(self, computation: Computation[W], transport: Transport) -> None:
        self.failure: BaseException | None = None
        self._computation = computation
        self._outbox = transport.outbox()
        self._scheduler = transport.scheduler_address

    def submit(self, work: W) -> None:
        """Raises ProtocolError where the work is malformed."""
        self._computation.apply(work)
        while not self._computation.is_idle:
            _send(self._computation.turn(), self._outbox, self._scheduler)

    def close(self) -> None:
        self._outbox.close()


class PacedExecutor(Generic[W]):
    """Computes on the event loop: cheap work within `submit`; what takes longer in slices, between which the loop does
    what else is due, such as heartbeats."""

    def __init__(
        self, computation: Computation[W], transport: Transport, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.failure: BaseException | None = None
        self._computation = computation
        self._outbox = transport.outbox()
        self._scheduler = transport.scheduler_address
        self._clock = clock
        self._next: asyncio.Handle | None = None  # slice
        self._in_slice = threading.Lock()  # an actor closes its executor in another thread
        self._is_closed = False

    def submit(self, work: W) -> None:
        """Raises ProtocolError where the work is malformed."""
        self._computation.apply(work)
        if self._next is None:
            self._compute()

    def _compute(self) -> None:
        end = self._clock() + SLICE
        while not self._computation.is_idle:
            _send(self._computation.turn(), self._outbox, self._scheduler)
            if self._clock() >= end:
                self._next = asyncio.get_running_loop().call_soon(self._go_on)
                return

    def _go_on(self) -> None:
        self._next = None
        try:
            with self._in_slice:
                if not self._is_closed:
                    self._compute()
        except Exception as error:
            log.exception("computation_failed")
            self.failure = error

    def close(self) -> None:
        """Finish the slice that is computed now, and drop the rest."""
        with self._in_slice:
            self._is_closed = True
            self._outbox.close()


class ThreadExecutor(Generic[W]):
    """Computes in one thread with a socket of its own, so that the event loop never waits for a computation."""

    def __init__(
        self,
        computation: Computation[W],
        transport: Transport,
        *,
        name: str,
        on_failure: Callable[[], None],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        niceness: int = 0,
    ) -> None:
        """`on_failure` is called in the thread, once `failure` is set; `within`: what the thread is in all its life;
        `niceness`: how much nicer than the others it is."""
        self.failure: BaseException | None = None
        self._computation = computation
        self._name = name
        self._on_failure = on_failure
        self._within = within
        self._niceness = niceness
        self._work: queue.SimpleQueue[W | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, args=(transport,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: W) -> None:
        self._work.put(work)

    def close(self) -> None:
        """Finish the piece that is computed now, and drop the rest."""
        drop_all(self._work)
        self._work.put(None)
        self._thread.join(timeout=60)

    def _loop(self, transport: Transport) -> None:
        outbox = transport.outbox()
        try:
            if self._niceness:
                give_way(self._niceness)
            with self._within():
                while self._catch_up():
                    _send(self._computation.turn(), outbox, transport.scheduler_address)
        except BaseException as error:
            log.exception(f"{self._name}_failed")
            self.failure = error
            self._on_failure()
        finally:
            outbox.close()

    def _catch_up(self) -> bool:
        """Apply all work that has come; wait for work where there is nothing to compute.  False at the end."""
        while True:
            try:
                work = self._work.get(block=self._computation.is_idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            try:
                self._computation.apply(work)
            except ProtocolError as error:
                log.warning("message_dropped", type=type(work).__name__, reason=str(error))


def drop_all(work: queue.SimpleQueue[W]) -> None:
    """What waits in a queue; the thread that it is for may take some of it meanwhile, so it is never asked whether it
    is empty."""
    with contextlib.suppress(queue.Empty):
        while True:
            work.get_nowait()


def _send(answers: Sequence[Message], outbox: Outbox, address: str) -> None:
    for answer in answers:
        outbox.send(address, answer)
    outbox.flush()
