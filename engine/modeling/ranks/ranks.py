"""A rank's model: a native decoder with a part of every weight, in a group that shares memory or is linked by sockets.

The leader's is a `engine.modeling.model.Model` like any other; what it computes it orders from the others, which
follow.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.description.ranks import PANEL, Place, first_heads
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec
from engine.lora.adapter import LoraAdapter
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool, Sliding
from engine.modeling.native.decoder import NativeDecoder, RankFirsts
from engine.modeling.ranks.expert_balancer import ExpertBalancer, PlannedMoves, held_by
from engine.modeling.ranks.expert_placement import balance
from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native
from shared.errors import FatalError

SPINS, SPINS_CROWDED = 1600, 60  # rounds of waiting before a rank sleeps: where each thread has a core, and elsewhere

CopyBlocks = Callable[[int, Sequence[tuple[int, int]]], None]


def firsts_of(spec: ModelSpec, place: Place) -> RankFirsts:
    """Of the whole model's description."""
    return RankFirsts(
        hidden=place.share(spec.hidden_size, PANEL).start,
        vocab=place.share(spec.vocab_size, PANEL).start,
        layers=tuple(
            (
                first_heads(layer.attention, place) * layer.attention.head_dim,
                place.share(layer.mlp.inner, PANEL).start,
                _first_of_experts(layer, place),
            )
            for layer in spec.layers
            if isinstance(layer.attention, AttentionSpec)
        ),
    )


def _first_of_experts(layer: LayerSpec, place: Place) -> int:
    experts = layer.mlp.experts
    return 0 if experts is None or place.whole_experts else int(place.share(experts.inner, PANEL).start)


def make_group(
    spec: ModelSpec,  # of the whole model
    place: Place,
    *,
    max_tokens: int,  # of a step
    max_seqs: int,
    max_rows: int,  # of logits
    table_columns: int,
    expert_bytes: int,  # as `Native.expert_bytes`
    slot_bytes: int,  # as `Native.slot_bytes`, where ranks have whole experts; else 0
    digest: int,  # of what the ranks have agreed on
    crowded: bool,  # there are more threads than cores
    sequence_parallel: bool = False,  # ranks divide the rows of norms
) -> abi.PgGroup:
    """Without memory."""
    return abi.PgGroup(
        rank=place.rank,
        ranks=place.ranks,
        spins=SPINS_CROWDED if crowded else SPINS,
        attended=max(one.num_heads * one.head_dim for one in spec.attentions),
        inner=max(layer.mlp.inner for layer in spec.layers),
        vocab=spec.vocab_size,
        joins=any(layer.attention_norm or layer.mlp_output_norm for layer in spec.layers),
        sequence_parallel=sequence_parallel,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_rows=max_rows,
        table_columns=table_columns,
        expert_bytes=expert_bytes,
        slot_bytes=slot_bytes,
        digest=digest,
    )


class RankedPool(KVPool):
    """The leader's blocks, which are copied in all ranks at once."""

    is_part = True

    def __init__(self, pool: KVPool, copy: CopyBlocks, number: int = 0) -> None:
        sliding = [RankedPool(one, copy, number) for number, one in enumerate(pool.sliding, 1)]
        super().__init__(pool.num_blocks, pool.block_size, pool.tensors, sliding)
        self._copy = copy
        self._number = number

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._copy(self._number, copies)


class RankDecoder:
    """One rank's.  Every call of the leader raises FatalError once the group has ended."""

    def __init__(
        self,
        decoder: NativeDecoder,
        native: Native,
        group: abi.PgGroup,
        shared: mmap.mmap,
        links: Sequence[int] = (),
    ) -> None:
        """`shared`: zeros that all ranks have, of `Native.group_bytes`; or that each has for itself, where `links` are
        sockets: the leader's to ranks 1, 2, ..., another one's to the leader."""
        self.spec, self.device, self.layer_bytes = decoder.spec, decoder.device, decoder.layer_bytes
        self.agreed = int(group.digest)  # of what all have agreed on
        self._decoder = decoder
        self._native = native
        self._group = group
        self._balancer: ExpertBalancer | None = None
        self._shared = torch.frombuffer(shared, dtype=torch.uint8)
        group.memory, group.bytes = self._shared.data_ptr(), len(self._shared)
        if links:
            group.links = (ctypes.c_int32 * len(links))(*links)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pool = self._decoder.allocate(num_blocks, block_size, sliding)
        self._decoder.join(self._group)
        self._decoder.use_group_logits(self._shared)
        return RankedPool(pool, self._copy_blocks)

    def balance_experts(self, interval: int, report: Callable[[PlannedMoves], None]) -> None:
        """From now on experts that ranks have whole are moved, by what was counted in so many steps."""
        mixtures = self._decoder.whole_experts
        self._balancer = ExpertBalancer(mixtures, self._group.ranks, interval, self._decoder.move_experts, report)

    @property
    def expert_balances(self) -> list[float]:
        """Of each layer with whole experts, by all rows since the start and where experts are now."""
        mixtures = (one for _, one in self._decoder.whole_experts)
        return [balance(one.loads.tolist(), held_by(one, self._group.ranks)) for one in mixtures]

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        self._decoder.reserve_adapters(count, max_rank)

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        """This rank's part; all ranks have to hold theirs before a step names the place."""
        self._decoder.hold_adapter(place, adapter)

    def drop_adapter(self, place: int) -> None:
        self._decoder.drop_adapter(place)

    def forward(self, batch: StepBatch) -> Tensor:
        self._balance()
        hidden = self._decoder.forward(batch)
        self._check()
        return hidden

    def forward_from(
        self,
        batch: StepBatch,
        inputs: Tensor,  # [num_tokens, hidden_size] float32
    ) -> Tensor:  # [sum of wanted, hidden_size]
        self._balance()
        hidden = self._decoder.forward_from(batch, inputs)
        self._check()
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] places of held ones, or -1
    ) -> Tensor:  # [n, vocab_size] float32
        most = self._group.max_rows
        if len(hidden) <= most:
            found = self._decoder.logits(hidden, adapters)
        else:
            pieces = _pieces(hidden, adapters, most)
            found = torch.cat([self._decoder.logits(piece, some).clone() for piece, some in pieces])
        self._check()
        return found

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] places of held ones, or -1
    ) -> Tensor:  # [n] int64
        pieces = _pieces(hidden, adapters, self._group.max_rows)
        found = torch.cat([self._decoder.greedy(piece, some) for piece, some in pieces])
        self._check()
        return found

    def follow(self) -> str:
        """What a rank that does not lead does, until the group ends; returns why."""
        self._decoder.follow()
        return self._native.why_ended(self._group)

    def gather(self, num_bytes: int, rounds: int) -> Ints:  # [rounds]
        """Nanoseconds of gathers, for benches: all ranks call this."""
        return self._native.gather(self._group, self.spec.hidden_size, num_bytes, rounds)

    def forget_orders(self) -> None:
        """As if this rank had read other orders than the others: the next one ends the group."""
        self._group.digest ^= 1

    def end(self, reason: int = abi.LEFT) -> None:
        """From any thread."""
        self._native.end_group(self._group, reason)

    def _copy_blocks(self, pool: int, copies: Sequence[tuple[int, int]]) -> None:
        self._decoder.copy_group_blocks(pool, copies)
        self._check()

    def _balance(self) -> None:
        if self._balancer is not None:
            self._balancer.step()

    def _check(self) -> None:
        if why := self._native.why_ended(self._group):
            raise FatalError(f"the group of ranks has ended: {why}")


def _pieces(hidden: Tensor, adapters: Ints | None, most: int) -> Iterator[tuple[Tensor, Ints | None]]:
    """At most so many rows at a time."""
    for first in range(0, max(1, len(hidden)), most):
        yield hidden[first : first + most], None if adapters is None else adapters[first : first + most]
