"""Applies updates and sends what they ask for, in the caller's thread or in one of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from services.draft.proposer import Proposer
from services.draft.session import DraftSession
from shared.errors import ProtocolError
from shared.messages import DraftUpdate
from shared.transport import Outbox, Transport

log = structlog.get_logger()


class Executor(Protocol):
    """Where updates go.  `failure` is what ended the drafting, for good."""

    failure: BaseException | None

    def submit(self, update: DraftUpdate) -> None: ...

    def close(self) -> None: ...


class InlineExecutor:
    """Does all that an update asks for where it is submitted: for prompt lookup, and for tests in one thread."""

    def __init__(self, proposer: Proposer, transport: Transport) -> None:
        self.failure: BaseException | None = None
        self._session = DraftSession(proposer)
        self._outbox = transport.outbox()
        self._scheduler = transport.scheduler_address

    def submit(self, update: DraftUpdate) -> None:
        """Raises ProtocolError where the update makes no sense."""
        self._session.apply(update)
        while not self._session.is_idle:
            send_answers(self._session, self._outbox, self._scheduler)

    def close(self) -> None:
        self._outbox.close()


class ThreadExecutor:
    """Works in a thread with a socket of its own, so that the event loop, which has the heartbeats, never waits."""

    def __init__(self, proposer: Proposer, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._updates: queue.SimpleQueue[DraftUpdate | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._loop, args=(proposer, transport), name="turns", daemon=True)
        self._thread.start()

    def submit(self, update: DraftUpdate) -> None:
        self._updates.put(update)

    def close(self) -> None:
        """Finish the piece of work that is being done, drop the rest."""
        while not self._updates.empty():
            self._updates.get_nowait()
        self._updates.put(None)
        self._thread.join(timeout=60)

    def _loop(self, proposer: Proposer, transport: Transport) -> None:
        outbox = transport.outbox()
        session = DraftSession(proposer)
        try:
            while self._catch_up(session):
                send_answers(session, outbox, transport.scheduler_address)
        except BaseException as error:
            log.exception("drafting_failed")
            self.failure = error
            self._on_failure()
        finally:
            outbox.close()

    def _catch_up(self, session: DraftSession) -> bool:
        """Apply every update that has come, and wait for one where there is nothing to do; False at the end."""
        while True:
            try:
                update = self._updates.get(block=session.is_idle)
            except queue.Empty:
                return True
            if update is None:
                return False
            apply(session, update)


def apply(session: DraftSession, update: DraftUpdate) -> None:
    """What makes no sense costs that update."""
    try:
        session.apply(update)
    except ProtocolError as error:
        log.warning("message_dropped", type=type(update).__name__, reason=str(error))


def send_answers(session: DraftSession, outbox: Outbox, scheduler: str) -> None:
    for answer in session.turn():
        outbox.send(scheduler, answer)
    outbox.flush()
