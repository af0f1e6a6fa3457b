"""The store's shell: threads of its data link serve blocks, the event loop tells the scheduler what there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import structlog

from services.store.arena import BlockArena
from services.store.backends.blocks import BackendBlocks
from services.store.disk import DiskBlocks
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.config import Settings
from shared.data_link.listening import DataLink
from shared.messages import (
    DropBlocks,
    LookUpBlocks,
    Member,
    Refused,
    Roster,
    ServiceName,
    StoreCapacity,
    StoreContents,
    StoreInbox,
    Tick,
)
from shared.transport import Transport

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shared.exposition import StoreState

log = structlog.get_logger()

PAGE = 4096  # keys in one message
TELL_SECONDS = 0.02  # between two accounts of what has changed


class StoreActor(MemberActor):
    """Outlives workers and schedulers; what it holds is soft state, that it tells to every life of a scheduler."""

    service = ServiceName.STORE
    inbox_union = StoreInbox

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        disk: DiskBlocks | None = None,
        backend: BackendBlocks | None = None,
    ) -> None:
        super().__init__(transport, settings)
        self.arena = BlockArena(settings.memory.store_memory, self._changed, disk, backend)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: DataLink | None = None
        self._is_telling = False
        self._is_awaited = False  # a sequence waits for what the next account says

    def handlers(self) -> Handlers:
        return {
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            DropBlocks: self.handle_drop,
            LookUpBlocks: self.handle_look_up,
            Tick: self.handle_tick,
        }

    async def on_start(self) -> None:
        self._loop = asyncio.get_running_loop()
        directory = self.settings.deployment.runtime_path
        self._link = DataLink(self.inbox.address, directory, self.instance, self.arena)
        log.info("store_opened", max_bytes=self.arena.max_bytes, data_link=self._link.address.partition(":")[0])
        await super().on_start()

    def store_capacity(self) -> StoreCapacity | None:
        if self._link is None:
            return None
        arena = self.arena
        return StoreCapacity(self._link.address, self._link.secret, arena.max_bytes, arena.backend is not None)

    def say_hello(self) -> None:
        """A hello is followed by all that there is: the scheduler may be another life, or have forgotten this store."""
        super().say_hello()
        self._tell(self.arena.keys(), [], is_first=True)

    def handle_drop(self, _: DropBlocks) -> None:
        log.error("store_emptied", reason="a block was not what its name says", num_blocks=len(self.arena.keys()))
        self.arena.drop(self.arena.keys())

    def handle_look_up(self, message: LookUpBlocks) -> None:
        self._is_awaited = True
        self.arena.look_up(message.keys)

    def collectors(self) -> list[Collector]:
        from shared.exposition import StoreCollector

        return [*super().collectors(), StoreCollector(self._state())]

    def _state(self) -> StoreState:
        from shared.exposition import Shelf, StoreState

        arena, disk, backend = self.arena, self.arena.disk, self.arena.backend
        from_disk, from_backend = arena.num_served_from_disk, arena.num_served_from_backend
        from_memory = arena.num_served - from_disk - from_backend
        shelves = {"memory": Shelf(len(arena), from_memory, arena.num_bytes, arena.max_bytes)}
        if disk is not None:
            shelves["disk"] = Shelf(len(disk), from_disk, disk.num_bytes, disk.max_bytes)
        if backend is not None:
            shelves["backend"] = Shelf(len(backend), from_backend)
        behind = [one for one in (disk, backend) if one is not None]
        num_links = self._link.num_connections if self._link is not None else 0
        num_corrupt, num_failed = sum(one.num_corrupt for one in behind), sum(one.num_failed for one in behind)
        return StoreState(self.instance, shelves, num_links, num_corrupt, num_failed)

    def _changed(self) -> None:
        """Called by a thread of the data link."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell_soon)

    def _tell_soon(self) -> None:
        if not self._is_telling and self._loop is not None and not self.is_over:
            self._is_telling = True
            self._loop.call_later(0.0 if self._is_awaited else TELL_SECONDS, self._tell_changes)

    def _tell_changes(self) -> None:
        self._is_telling = self._is_awaited = False
        if self.is_over:
            return
        kept, dropped, is_first = self.arena.take_changes()
        self._tell(kept, dropped, is_first=is_first)
        self.outbox.flush()

    def _tell(self, kept: Sequence[bytes], dropped: Sequence[bytes], *, is_first: bool) -> None:
        for index, (some, others) in enumerate(zip(pages(kept, dropped), pages(dropped, kept), strict=True)):
            self.send(self.scheduler, StoreContents(self.instance, some, others, is_first=is_first and index == 0))

    def on_moved(self) -> None:
        if self._link is not None:
            self._link.move(self.inbox.address)

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        """Workers come and go without a word to a store."""

    async def on_stop(self) -> None:
        await super().on_stop()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)
        await asyncio.to_thread(self.arena.close)


def pages(keys: Sequence[bytes], beside: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Keys in parts for a message each, as many as the longer of the two has; one at least."""
    longest = max(len(keys), len(beside), 1)
    return (list(keys[start : start + PAGE]) for start in range(0, longest, PAGE))
