"""The mover: two threads beside the step thread that carry the bytes of blocks, one to stores, one from them and from
other workers.

So what is fetched for a request that waits comes in time, whatever becomes of what is given away.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from services.worker.blocks.block_desk import Arrived, MovableBlocks
from shared.actor.executor import drop_all
from shared.data_link.client import CorruptBlockError, DataLinks
from shared.data_link.frames import group_size
from shared.errors import ProtocolError
from shared.messages import BlocksMoved, FetchBlocks, OfferBlocks
from shared.transport import Transport
from shared.transport.link import worth_a_line

log = structlog.get_logger()

MAX_STAGINGS = 8  # pieces of memory that are kept to be used again
START = 0.04  # of the time of computing, which a fetch may lose
LEAST_START = 0.01  # seconds
RESTS = 6.0  # of the time that a group of an unhurried fetch has taken, before the next one
LONGEST_REST = 0.02  # seconds: a fetch that is urgent may be asked for meanwhile
REST_WITHIN = 1.0  # seconds after an order has come: the scheduler waits for 4, and many blocks need some of them
MISSING, CORRUPT, UNREACHABLE = "missing", "corrupt", "unreachable"
SLOW = "slow"  # computing the rest is faster
DIFFERENT = "different"  # a store has other bytes than were computed, with their own right checksum

Bytes = npt.NDArray[np.uint8]


class BlockMover:
    """One order of each kind after the other.  What a link or a store does wrong costs the order and nothing else."""

    def __init__(
        self, blocks: MovableBlocks, transport: Transport, directory: Path, arrived: Callable[[Arrived], None]
    ) -> None:
        """`arrived` is called in a thread of the mover, with blocks for the step thread."""
        self._blocks = blocks
        self._arrived = arrived
        self._outward, self._inward = (DataLinks(directory, copy=blocks.copy) for _ in range(2))
        self._offers: queue.SimpleQueue[tuple[OfferBlocks, Bytes] | None] = queue.SimpleQueue()
        self._fetches: queue.SimpleQueue[tuple[FetchBlocks, int, float] | None] = queue.SimpleQueue()
        self._num_urgent = 0  # fetches for which clients wait, of all that were asked for
        self._num_begun = 0  # of these
        self._num_failed = 0
        self._stagings: deque[Bytes] = deque(maxlen=MAX_STAGINGS)  # that nothing is in any more
        giver = threading.Thread(target=self._give_away, args=(transport,), name="mover-out", daemon=True)
        bringer = threading.Thread(target=self._bring_all, name="mover-in", daemon=True)
        self._threads = (giver, bringer)
        for thread in self._threads:
            thread.start()

    def give(self, order: OfferBlocks, data: Bytes) -> None:
        self._offers.put((order, data))

    def fetch(self, order: FetchBlocks, count: int) -> None:
        self._num_urgent += not order.is_unhurried
        self._fetches.put((order, count, time.monotonic()))

    def release(self, data: Bytes) -> None:
        """What has arrived is written, and its memory may be used again."""
        if isinstance(data.base, np.ndarray):
            self._stagings.append(data.base)

    def close(self) -> None:
        """End once the order in hand is over; the others are dropped."""
        drop_all(self._offers)
        drop_all(self._fetches)
        self._offers.put(None)
        self._fetches.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def _give_away(self, transport: Transport) -> None:
        outbox = transport.outbox()
        try:
            while (work := self._offers.get()) is not None:
                order, data = work
                answer = self._compare(order, data) if order.is_check else self._take_away(order, data)
                outbox.send(transport.scheduler_address, answer)
                outbox.flush()
        finally:
            self._outward.close()
            outbox.close()

    def _bring_all(self) -> None:
        try:
            while (work := self._fetches.get()) is not None:
                order, count, asked = work
                self._num_begun += not order.is_unhurried
                self._bring(order, count, asked)
        finally:
            self._inward.close()

    def _take_away(self, order: OfferBlocks, data: Bytes) -> BlocksMoved:
        begun, num_done, reason = time.monotonic(), 0, ""
        try:
            names = order.names[: len(data)]
            num_done = self._outward.put(order.address, order.secret, self._blocks.space, names, rows_of(data))
        except (OSError, ProtocolError) as error:
            reason = self._failed(order, error)
        seconds = time.monotonic() - begun
        return BlocksMoved(order.epoch, order.move_id, num_done, num_done * self._blocks.block_bytes, seconds, reason)

    def _compare(self, order: OfferBlocks, data: Bytes) -> BlocksMoved:
        """As many are done as the store has just so."""
        num_equal, reason = 0, ""
        try:
            stored = np.empty_like(data)
            names = order.names[: len(data)]
            found = self._outward.get(order.address, order.secret, self._blocks.space, names, rows_of(stored))
            differs = (stored[:found] != data[:found]).any(axis=1)
            num_equal = int(differs.argmax()) if differs.any() else found
            reason = DIFFERENT if num_equal < found else MISSING if found < len(names) else ""
        except (OSError, ProtocolError) as error:
            reason = self._failed(order, error)
        return BlocksMoved(order.epoch, order.move_id, num_equal, reason=reason)

    def _bring(self, order: FetchBlocks, count: int, asked: float) -> None:
        """What comes is written to the pool while more of it comes.  `asked`: when the order came."""
        size, done, reason, rested = self._blocks.block_bytes, 0, "", 0.0
        begun = since = time.monotonic()
        nothing: Bytes = np.empty((0, size), np.uint8)
        piece = nothing

        def places(num_blocks: int) -> list[memoryview]:
            nonlocal piece
            piece = self._staging(num_blocks)
            return rows_of(piece)

        def deadline(num_blocks: int) -> float:
            return begun + patience(order, num_blocks, count)

        def arrive(data: Bytes, *, is_last: bool) -> None:
            num_bytes, seconds = (done + len(data)) * size, time.monotonic() - begun - rested
            self._arrived(Arrived(order, done, data, is_last, num_bytes, seconds, reason))

        source = order.address, order.secret, self._blocks.space
        try:
            for found in self._inward.get_groups(*source, order.names[:count], size, places, deadline):
                arrive(piece[:found], is_last=done + found == count)
                done += found
                now = time.monotonic()
                if done < count and self._may_rest(order, now - asked):
                    time.sleep(min(RESTS * (now - since), LONGEST_REST))
                    rested += time.monotonic() - now
                since = time.monotonic()
            reason = MISSING
        except TimeoutError:
            reason = SLOW
        except (OSError, ProtocolError) as error:
            reason = self._failed(order, error)
        if done < count:
            arrive(nothing, is_last=True)

    def _may_rest(self, order: FetchBlocks, seconds: float) -> bool:
        """Between groups, so long after the order came.  Copies in one go would slow down the next step or two of all
        streams, here and where the blocks come from."""
        return order.is_unhurried and seconds < REST_WITHIN and self._num_urgent == self._num_begun

    def _staging(self, count: int) -> Bytes:
        """Room for so many blocks of one group.  Memory that was used before is there already: the kernel gives new
        memory page by page, which takes about as long as what is received into it."""
        try:
            return self._stagings.popleft()[:count]
        except IndexError:
            size = self._blocks.block_bytes
            return np.empty((group_size(size), size), np.uint8)[:count]

    def _failed(self, order: OfferBlocks | FetchBlocks, error: Exception) -> str:
        self._num_failed += 1
        if worth_a_line(self._num_failed):
            log.warning("move_failed", store=order.store, reason=str(error), num_failed=self._num_failed)
        return CORRUPT if isinstance(error, CorruptBlockError) else UNREACHABLE


def patience(order: FetchBlocks, num_blocks: int, count: int) -> float:
    """Seconds after the beginning of a fetch by which its first `num_blocks` blocks must have come; inf: no limit.

    A worker that gives up then, and computes the rest, is done within 1 + START (or LEAST_START seconds more) of the
    time that computing all `count` blocks would have taken.
    """
    if not order.seconds:
        return math.inf
    return max(LEAST_START, START * order.seconds) + order.seconds * num_blocks / count


def rows_of(data: Bytes) -> list[memoryview]:
    return [memoryview(row) for row in data]
