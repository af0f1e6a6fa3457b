"""The draft's shell: the event loop handles updates, signals and heartbeats; the executor sends the proposals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from services.draft.proposer import Proposer
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.actor.executor import Executor
from shared.config import Settings
from shared.errors import FatalError
from shared.messages import DraftCapacity, DraftInbox, DraftUpdate, Refused, Roster, ServiceName, Tick
from shared.processes.standard_streams import drain_standard_streams
from shared.transport import Transport

log = structlog.get_logger()


class DraftActor(MemberActor):
    """Holds soft state only: the scheduler sends all of it again to a draft that reports that it has lost rows."""

    service = ServiceName.DRAFT
    inbox_union = DraftInbox

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        load: Callable[[], Proposer] | None,
        make_executor: Callable[[Proposer, Transport], Executor[DraftUpdate]],
    ) -> None:
        super().__init__(transport, settings)
        self._load = load
        self._make_executor = make_executor
        self._capacity: DraftCapacity | None = None
        self._executor: Executor[DraftUpdate] | None = None

    def handlers(self) -> Handlers:
        return {
            DraftUpdate: self.handle_update,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def draft_capacity(self) -> DraftCapacity | None:
        return self._capacity

    async def on_start(self) -> None:
        if self._load is None:
            log.info("draft_off", hint="set draft to ngram or to a model's directory")
        else:
            proposer = await asyncio.to_thread(self._load)
            self._capacity = proposer.capacity
            self._executor = self._make_executor(proposer, self.transport)
        await super().on_start()

    def request_drain(self, deadline: float | None = None) -> None:
        """A draft that is still loading holds nothing and leaves at once."""
        if self._load is not None and self._executor is None:
            drain_standard_streams()
            os._exit(0)
        super().request_drain(deadline)

    def handle_update(self, update: DraftUpdate) -> None:
        """Raises ProtocolError on an update that is not from the scheduler of this life."""
        self.check_link(update.epoch)
        if self._executor is not None:
            self._executor.submit(update)

    def on_tick(self) -> None:
        if self._executor is not None and self._executor.failure is not None:
            raise FatalError(f"drafting failed: {self._executor.failure!r}") from self._executor.failure

    async def on_stop(self) -> None:
        """Leave the roster, so that nothing waits for this draft; then end the thread, which would block the exit."""
        await super().on_stop()
        if self._executor is not None:
            await asyncio.to_thread(self._executor.close)
