"""Orders to give blocks away and to fetch some, as the step thread carries them out: between steps, in order with them.

An order is late or repeated where its number does not grow; the scheduler then hears nothing of it, and takes the move
for failed.  No error of a move is one of the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.worker.blocks.served import ReadableBlocks, ServedBlocks
from shared.data_link.copying import Copy
from shared.messages import BlocksMoved, FetchBlocks, OfferBlocks, ServeBlocks

MoveOrder = OfferBlocks | FetchBlocks | ServeBlocks


class MovableBlocks(ReadableBlocks, Protocol):
    """`engine.execution.tables.block_access.BlockAccess`, for a worker that has a pool."""

    copy: Copy | None  # of bytes on their way to them; None: the usual one

    def claim(self, blocks: Sequence[int], generations: Sequence[int]) -> int: ...

    def write(self, blocks: Sequence[int], generations: Sequence[int], data: Any) -> int: ...


class Carrier(Protocol):
    """Takes bytes to a store and brings some, beside the step thread."""

    def give(self, order: OfferBlocks, data: Any) -> None:
        """Have a store keep the first blocks of an order, and answer it."""

    def fetch(self, order: FetchBlocks, count: int) -> None:
        """Bring the first blocks of an order; `Arrived` with some of them at a time, in order."""

    def release(self, data: Any) -> None:
        """What has arrived is not needed any more."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Some blocks of an order have come, in the order of their names."""

    order: FetchBlocks
    first: int  # place of the first of them
    data: Any  # of so many blocks
    is_last: bool  # nothing more comes
    num_bytes: int = 0  # of the whole move so far
    seconds: float = 0.0
    reason: str = ""  # why nothing more comes

    @property
    def epoch(self) -> int:
        return self.order.epoch


class BlockDesk:
    """Invariant: what arrives is written only where it follows on what was written of its order before."""

    def __init__(self, blocks: MovableBlocks, carrier: Carrier) -> None:
        self.served = ServedBlocks(blocks)  # to other workers
        self._blocks = blocks
        self._carrier = carrier
        self._epoch = 0
        self._last = 0  # number of the newest order
        self._num_done: dict[int, int] = {}  # blocks written, by number of a fetch that is under way

    def take(self, work: MoveOrder | Arrived) -> list[BlocksMoved]:
        """Of the epoch that the plans are of."""
        if isinstance(work, Arrived):
            return self._arrive(work)
        if work.epoch != self._epoch:
            self._epoch, self._last = work.epoch, 0
            self._num_done.clear()
        if work.move_id <= self._last:
            return []
        self._last = work.move_id
        if isinstance(work, ServeBlocks):
            count = self.served.serve(work.names, work.blocks, work.generations)
            return [BlocksMoved(work.epoch, work.move_id, count)]
        return self._offer(work) if isinstance(work, OfferBlocks) else self._fetch(work)

    def _offer(self, order: OfferBlocks) -> list[BlocksMoved]:
        data = self._blocks.read(order.blocks, order.generations)
        if not len(data):
            return [BlocksMoved(order.epoch, order.move_id, 0, reason="another life of the block")]
        self._carrier.give(order, data)
        return []

    def _fetch(self, order: FetchBlocks) -> list[BlocksMoved]:
        count = self._blocks.claim(order.blocks, order.generations)
        if not count:
            return [BlocksMoved(order.epoch, order.move_id, 0, reason="another life of the block")]
        self._num_done[order.move_id] = 0
        self._carrier.fetch(order, count)
        return []

    def _arrive(self, some: Arrived) -> list[BlocksMoved]:
        order = some.order
        num_done = self._num_done.get(order.move_id)
        if num_done is None or order.epoch != self._epoch:
            return []
        if len(some.data) and some.first == num_done:
            places = slice(num_done, num_done + len(some.data))
            num_done += self._blocks.write(order.blocks[places], order.generations[places], some.data)
            self._num_done[order.move_id] = num_done
        self._carrier.release(some.data)
        if not some.is_last:
            return []
        del self._num_done[order.move_id]
        return [BlocksMoved(order.epoch, order.move_id, num_done, some.num_bytes, some.seconds, some.reason)]
