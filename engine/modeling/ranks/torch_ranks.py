"""A rank's model where ranks compute with torch: a decoder with a part of the weights, and collectives.

The leader's is a `engine.modeling.model.Model` like any other.  Over links it orders steps, copies of blocks and heads;
the others follow.  Sampling is the leader's alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.description.ranks import PANEL, widths
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool, Sliding
from engine.modeling.ranks.collectives import Collectives
from engine.modeling.ranks.rank_links import FollowingLink, LeadingLinks, MeetingOrder, RankOrder
from engine.modeling.ranks.ranks import RankedPool
from engine.modeling.ranks.step_orders import CopyOrder, HeadOrder, OrderedBatches, StepOrder, order_step
from engine.modeling.torch_decoder.decoder import Decoder
from engine.modeling.torch_decoder.dual_batch import DualBatch, halves
from kernels.cpu.binding import abi
from shared.errors import FatalError


class TorchRankDecoder:
    """Any rank's, before it is connected to the others: what they would give is zero.

    `LeadingTorchRank` and `FollowingTorchRank` compute with what this one has then.
    """

    def __init__(self, part: Decoder, collectives: Collectives, *, dual_batch_threshold: int = 0) -> None:
        """`dual_batch_threshold`: tokens of a step that is computed as two halves in turns; 0: none is."""
        self.spec, self.device, self.layer_bytes = part.spec, part.device, part.layer_bytes
        self.part = part
        self.collectives = collectives
        self.dual_batch_threshold = dual_batch_threshold
        self._pools: tuple[KVPool, ...] = ()
        self._vocab = widths(collectives.place, part.spec.vocab_size, PANEL)
        self._dual = DualBatch(part.device) if dual_batch_threshold else None
        if self._dual is not None:
            collectives.pass_turn = self._dual.pass_turn

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pool = self.part.allocate(num_blocks, block_size, sliding)
        self._pools = (pool, *pool.sliding)
        return pool

    def forward(self, batch: StepBatch) -> Tensor:
        found = None if self._dual is None else halves(batch, self.dual_batch_threshold)
        if found is None or self._dual is None:
            return self.part.forward(batch)
        first, second = found
        return torch.cat(self._dual.run(partial(self.part.forward, first), partial(self.part.forward, second)))

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n, vocab_size] float32
        products = self._products(hidden)
        return self.part.logits_of(products.new_zeros(len(hidden), self.spec.vocab_size))

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n] int64
        return self.part.kernels.sampling.argmax(self.logits(hidden))

    def _products(self, hidden: Tensor) -> Tensor:  # [n, features of the rank's part of the vocabulary]
        return self.part.products(self.collectives.from_leader(hidden.contiguous()))

    def _gathered(self, hidden: Tensor) -> Tensor | None:  # [n, vocab_size]; None where this rank does not lead
        return self.collectives.to_leader(self._products(hidden), self._vocab)

    def _best(self, hidden: Tensor) -> Tensor | None:  # [n, 2 * ranks]: of each rank a score and a token id
        products = self._products(hidden)
        chosen = self.part.kernels.sampling.argmax(products)
        scores = products.gather(1, chosen[:, None]).double()
        first = sum(self._vocab[: self.collectives.place.rank])
        own = torch.cat((scores, (chosen[:, None] + first).double()), dim=1)
        return self.collectives.to_leader(own, (2,) * len(self._vocab))


class LeadingTorchRank(TorchRankDecoder):
    """Every call raises FatalError once the group has ended."""

    def __init__(self, own: TorchRankDecoder, links: LeadingLinks) -> None:
        super().__init__(own.part, own.collectives, dual_batch_threshold=own.dual_batch_threshold)
        self._links = links
        self._num_orders = 0

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        return RankedPool(super().allocate(num_blocks, block_size, sliding), self._copy_blocks)

    def forward(self, batch: StepBatch) -> Tensor:
        self._order(order_step(self._num_orders, batch, len(self._pools)))
        return super().forward(batch)

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n, vocab_size] float32
        self._order(HeadOrder(self._num_orders, len(hidden), is_greedy=False))
        products = self._gathered(hidden)
        assert products is not None
        self._confirm()
        return self.part.logits_of(products)

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # none are served
    ) -> Tensor:  # [n] int64
        if self.spec.logit_softcap:
            return super().greedy(hidden)
        self._order(HeadOrder(self._num_orders, len(hidden), is_greedy=True))
        best = self._best(hidden)
        assert best is not None
        self._confirm()
        # The first of equal scores is that of the lowest rank, whose token ids are lowest.
        winners = best[:, 0::2].argmax(dim=1, keepdim=True)
        return best[:, 1::2].gather(1, winners)[:, 0].long()

    def follow(self) -> str:
        raise AssertionError("the leader follows none")

    def forget_orders(self) -> None:
        """As if this rank had sent other orders than the others have read: the next token ends the group."""
        self._links.digest.spoil()

    def end(self, reason: int = abi.LEFT) -> None:
        """From any thread."""
        self.collectives.end(reason)
        self._links.hang_up()

    def _copy_blocks(self, pool: int, copies: Sequence[tuple[int, int]]) -> None:
        self._order(CopyOrder(self._num_orders, pool, list(copies)))
        self._pools[pool].copy_blocks(copies)

    def _order(self, order: RankOrder) -> None:
        self.collectives.check()
        self._num_orders += 1
        try:
            self._links.send(order)
        except OSError:
            self._lose(abi.RANK_DIED)

    def _confirm(self) -> None:
        """That all ranks have read the same orders, and are there still."""
        try:
            if not self._links.all_agree():
                self._lose(abi.DISAGREED)
        except OSError:
            self._lose(abi.RANK_DIED)
        self.collectives.check()

    def _lose(self, reason: int) -> None:
        self.end(reason)
        self.collectives.check()


class FollowingTorchRank(TorchRankDecoder):
    """It computes what comes over its link, until that is closed."""

    def __init__(self, own: TorchRankDecoder, link: FollowingLink, *, max_seqs: int, longest: int) -> None:
        """For steps of up to so many sequences of up to `longest` tokens."""
        super().__init__(own.part, own.collectives, dual_batch_threshold=own.dual_batch_threshold)
        self._link = link
        self._batches = OrderedBatches(max_seqs, longest, own.device)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pool = super().allocate(num_blocks, block_size, sliding)
        self._batches.allocate(block_size, len(self._pools))
        return pool

    @torch.inference_mode()
    def follow(self) -> str:
        """What a rank that does not lead does, until the group ends; returns why.  Raises FatalError."""
        with contextlib.suppress(OSError):  # the leader has left, or is gone
            while True:
                self._obey(self._link.receive())
        self.end()
        return self.collectives.why_ended

    def forget_orders(self) -> None:
        """As if this rank had read other orders than the leader has sent: the next token ends the group."""
        self._link.digest.spoil()

    def end(self, reason: int = abi.LEFT) -> None:
        """From any thread."""
        self.collectives.end(reason)
        self._link.hang_up()

    def _obey(self, order: RankOrder) -> None:
        if isinstance(order, StepOrder):
            self.forward(self._batches.read(order))
        elif isinstance(order, CopyOrder):
            self._pools[order.pool].copy_blocks(order.copies)
        elif isinstance(order, HeadOrder):
            self._link.answer()
            rows = torch.zeros(order.num_rows, self.spec.hidden_size, dtype=self.part.norm.weight.dtype)
            head = self._best if order.is_greedy else self._gathered
            head(rows.to(self.device))
        elif isinstance(order, MeetingOrder):
            raise FatalError("the leader says again where ranks meet")
