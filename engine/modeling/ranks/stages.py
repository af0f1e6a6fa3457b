"""A stage's model: a native decoder with some of the layers, in a pipeline whose stages are linked by sockets.

The leader's is a `engine.modeling.model.Model` like any other, whose steps may be begun before earlier ones are
finished; the other stages follow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool, Sliding
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.ranks.ranks import RankDecoder, RankedPool
from engine.modeling.ranks.stage_links import Frame, StageLink, StageRing
from engine.modeling.ranks.step_orders import CopyOrder, Octets, OrderedBatches, StepOrder, order_step
from kernels.cpu.binding import abi
from kernels.cpu.binding.ranks import why_ended
from shared.errors import FatalError


class StagedDecoder:
    """The leader's: the last stage.  Every call raises FatalError once the group has ended."""

    def __init__(self, decoder: NativeDecoder | RankDecoder, links: Sequence[int], first_number: int) -> None:
        """`links`: sockets to the stages before it, in order; `first_number`: of the orders, which all stages agree
        on."""
        self.spec = decoder.spec  # of its layers
        self.device, self.layer_bytes = decoder.device, decoder.layer_bytes
        self.seconds = [0.0] * len(links)  # that the stages before it have computed
        self._decoder = decoder
        self._ring = StageRing(links, 4 * decoder.spec.hidden_size)
        self._number = first_number
        self._begun: deque[int] = deque()  # numbers
        self._pools: tuple[KVPool, ...] = ()

    @property
    def waited(self) -> float:
        """Seconds in which the last stage had to wait for those before it."""
        return self._ring.waited

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pool = self._decoder.allocate(num_blocks, block_size, sliding)
        self._pools = (pool, *pool.sliding)
        return RankedPool(pool, self._order_copy)

    def forward(self, batch: StepBatch) -> Tensor:
        self.begin(batch)
        return self.finish(batch)

    def begin(self, batch: StepBatch) -> None:
        number = self._next_number()
        self._begun.append(number)
        self._ring.send(order_step(number, batch, len(self._pools)))

    def finish(self, batch: StepBatch) -> Tensor:
        order, rows = self._due_step()
        if order.number != self._begun.popleft() or not len(rows):
            self.end(abi.DISAGREED)
            self._ring.check()
        self.seconds = [before + one for before, one in zip(self.seconds, order.seconds, strict=True)]
        return self._decoder.forward_from(batch, residuals(rows, self.spec.hidden_size))

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n, vocab_size] float32
        return self._decoder.logits(hidden)

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n] int64
        return self._decoder.greedy(hidden)

    def follow(self) -> str:
        """What a stage that does not lead does, until the group ends; returns why."""
        raise AssertionError("the leader follows none")

    def forget_orders(self) -> None:
        """As if this stage had sent other orders than the others have read: the next one ends the group."""
        self._number += 1

    def end(self, reason: int = abi.LEFT) -> None:
        """From any thread."""
        self._ring.end(reason)

    def _due_step(self) -> tuple[StepOrder, Octets]:
        """Copies before it are made; they stand where the scheduler put them in the order of steps."""
        while True:
            frame = self._ring.take()
            if isinstance(frame.order, StepOrder):
                return frame.order, frame.rows
            self._pools[frame.order.pool].copy_blocks(frame.order.copies)

    def _order_copy(self, pool: int, copies: Sequence[tuple[int, int]]) -> None:
        self._ring.send(CopyOrder(self._next_number(), pool, list(copies)))

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


class FollowingStage(StagedDecoder):
    """Any stage but the last.  It computes what comes over its link, and sends it on; it has no logits."""

    def __init__(
        self, decoder: NativeDecoder | RankDecoder, link: int, first_number: int, *, max_seqs: int, longest: int
    ) -> None:
        """For steps of up to so many sequences of up to `longest` tokens."""
        super().__init__(decoder, (), first_number)
        self._link = StageLink(link)
        self._batches = OrderedBatches(max_seqs, longest, decoder.device)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pool = super().allocate(num_blocks, block_size, sliding)
        self._batches.allocate(block_size, len(self._pools))
        return pool

    def follow(self) -> str:
        """Until the group ends; returns why.  Raises FatalError where an order is not the one that is due."""
        while True:
            try:
                order, rows = self._link.receive(4 * self.spec.hidden_size)
            except OSError:
                return why_ended(abi.LEFT)
            if order.number != self._next_number():
                raise FatalError(f"order {order.number} came in the place of {self._number - 1}")
            if isinstance(order, CopyOrder):
                self._pools[order.pool].copy_blocks(order.copies)
                passed = Frame(order, rows)
            else:
                passed = self._compute(order, rows)
            try:
                self._link.send(*passed)
            except OSError:
                return why_ended(abi.LEFT)

    def end(self, reason: int = abi.LEFT) -> None:
        self._link.hang_up()

    def _compute(self, order: StepOrder, rows: Octets) -> Frame:
        begun = time.perf_counter()
        batch = self._batches.read(order)
        if len(rows):
            found = self._decoder.forward_from(batch, residuals(rows, self.spec.hidden_size))
        else:
            found = self._decoder.forward(batch)
        took = time.perf_counter() - begun
        passed = msgspec.structs.replace(order, seconds=[*order.seconds, took])
        return Frame(passed, found.view(torch.uint8).flatten().numpy())


def residuals(rows: Octets, hidden: int) -> Tensor:  # [num_tokens, hidden_size] float32
    return torch.from_numpy(rows).view(torch.float32).view(-1, hidden)
