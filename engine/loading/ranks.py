"""How the ranks of a group come together: each loads its part, all compare what they have, the leader settles the rest.

    a rank  -> leader   RankReady   what it has: a fingerprint, room for blocks; or why it cannot work
    leader  -> a rank   GroupStart  what all of them have, and how large the memory is that they share

Each rank has a channel to the leader, and the memory's descriptor: of memory that all share, or, where ranks are linked
by sockets, of its own.  A channel that ends, or on which nothing comes, is a rank that has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from engine.description.ranks import Place, cut_spec
from engine.description.spec import ModelSpec
from engine.execution.adapters import AdapterBank
from engine.loading.backend import Backend, usable_cores
from engine.loading.memory import MemoryPlan
from engine.loading.profile import most_positions
from engine.loading.rank_adapters import AdapterHeld, AdapterOrders, HoldAdapter
from engine.modeling.native.decoder import NativeDecoder, build_native, describe_whole
from engine.modeling.ranks.expert_balancer import PlannedMoves
from engine.modeling.ranks.ranks import RankDecoder, firsts_of, make_group
from engine.weights.part_source import RankSource
from engine.weights.source import WeightSource
from kernels.cpu.binding import abi
from shared.config import EngineSettings, Settings
from shared.errors import ConfigError, ModelError
from shared.messages.fingerprint import Fingerprint
from shared.ranks.channel import Channel

MOST_TOKENS = 1 << 14  # of a step, at least: the scheduler's settings may be others; memory is there once it is used
LOADING_SILENCE = 60.0  # seconds: a process that imports and reads files may be kept from saying anything

WITH_TORCH = "kernels=torch, or device=cuda for a GPU for each rank, has ranks compute with torch"

log = structlog.get_logger()


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has loaded its part, or cannot."""

    rank: int
    error: str = ""
    fingerprint: Fingerprint = Fingerprint()
    num_blocks: int = 0
    max_model_len: int = 0
    sliding: list[tuple[int, int]] = []  # windows, and blocks of their pools
    experts: str = ""  # a digest of how whole ones are packed and moved


class GroupStart(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What all ranks go by."""

    num_blocks: int
    max_model_len: int
    sliding: list[tuple[int, int]]
    num_bytes: int  # of the memory that they share
    digest: int  # of all of that


class RankModel(Protocol):
    """What a group needs of a rank's model."""

    def follow(self) -> str:
        """What a rank that does not lead does, until the group ends; returns why."""
        ...

    def forget_orders(self) -> None:
        """As if this rank had read other orders than the others: the next one ends the group."""
        ...

    def end(self, reason: int = abi.LEFT) -> None:
        """From any thread."""
        ...


class Ranks(Protocol):
    """A rank's way to the others, while a model is loaded."""

    @property
    def place(self) -> Place: ...

    @property
    def number(self) -> int:
        """Among all ranks of the worker, for errors: another one than its place where stages are groups of ranks."""
        ...

    @property
    def memory(self) -> int:
        """The descriptor of the memory that all share, or of this rank's; empty at first."""
        ...

    @property
    def links(self) -> Sequence[int]:
        """Descriptors of sockets to the other ranks that data pass, as `RankDecoder` has them; empty where all share
        memory.  Stages of a pipeline always have them."""
        ...

    def settle(self, own: RankReady, num_bytes: int) -> GroupStart:
        """What all ranks go by; the leader has the memory of so many bytes ready then."""
        ...

    def joined(self, model: RankModel) -> None:
        """The rank's model is there."""

    def serve(self, adapters: AdapterBank) -> None:
        """These are the rank's."""


def agree(ready: Sequence[RankReady], num_bytes: int) -> GroupStart:
    """The smallest of what ranks have, the leader's first.

    Raises ConfigError where one cannot work, or where they do not have the same weights, formats and kernels.
    """
    first = ready[0]
    for other in ready[1:]:
        if other.error:
            raise ConfigError(f"rank {other.rank}: {other.error}")
        names = Fingerprint.__struct_fields__
        if differing := [
            name for name in names if getattr(other.fingerprint, name) != getattr(first.fingerprint, name)
        ]:
            raise ConfigError(
                f"rank {other.rank} differs from rank {first.rank} in {', '.join(differing)}: all ranks need the same "
                "files, formats and kernels"
            )
        if other.experts != first.experts:
            raise ConfigError(
                f"rank {other.rank} packs its experts otherwise than rank {first.rank}, or has other settings for "
                "them: enable_eplb, num_redundant_experts and eplb_step_interval must be the same at all ranks, and "
                "enable_eplb cannot be set where experts of a layer are packed in several ways, by their content"
            )
    windows = [window for window, _ in first.sliding]
    start = GroupStart(
        num_blocks=min(one.num_blocks for one in ready),
        max_model_len=min(one.max_model_len for one in ready),
        sliding=[(window, min(one.sliding[place][1] for one in ready)) for place, window in enumerate(windows)],
        num_bytes=num_bytes,
        digest=0,
    )
    said = msgspec.msgpack.encode([start, first.fingerprint])
    digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")
    return msgspec.structs.replace(start, digest=digest)


class LeadingRanks:
    """The leader's end; `channels` are those of ranks 1, 2, ... in order."""

    def __init__(self, channels: Sequence[Channel], memory: int, ranks: int) -> None:
        self.place = Place(0, ranks)
        self.number = 0
        self.memory = memory
        self.links: Sequence[int] = ()
        self.model: RankModel | None = None  # once it has joined
        self.above: Ranks | None = None  # the way to the other stages, where these ranks are one
        self.adapter_orders = AdapterOrders()
        self._channels = channels

    def settle(self, own: RankReady, num_bytes: int) -> GroupStart:
        others = [channel.receive(RankReady, patience=LOADING_SILENCE) for channel in self._channels]
        start = agree([own, *others], num_bytes)
        if self.above is not None:
            of_all = RankReady(self.number, "", own.fingerprint, start.num_blocks, start.max_model_len, start.sliding)
            start = self.above.settle(of_all, num_bytes)
        os.ftruncate(self.memory, start.num_bytes)
        for channel in self._channels:
            channel.send(start)
        return start

    def joined(self, model: RankModel) -> None:
        self.model = model

    def serve(self, adapters: AdapterBank) -> None:
        self.adapter_orders.channels = self._channels
        adapters.hold_elsewhere = self.adapter_orders.hold


class FollowingRank:
    """The end of a rank that does not lead; `links`: the socket to the leader, where they do not share the memory."""

    def __init__(
        self, place: Place, channel: Channel, memory: int, links: Sequence[int] = (), number: int | None = None
    ) -> None:
        self.place = place
        self.number = place.rank if number is None else number
        self.memory = memory
        self.links = links
        self.channel = channel
        self.model: RankModel | None = None
        self._adapters: AdapterBank | None = None

    def settle(self, own: RankReady, num_bytes: int) -> GroupStart:
        self.channel.send(own)
        start = self.channel.receive(GroupStart)
        if self.links:
            os.ftruncate(self.memory, start.num_bytes)
        return start

    def joined(self, model: RankModel) -> None:
        self.model = model

    def serve(self, adapters: AdapterBank) -> None:
        self._adapters = adapters

    def hold(self, order: HoldAdapter) -> AdapterHeld:
        """Read this rank's part of an adapter; a file or path that cannot be served is the order's error alone."""
        error = ""
        try:
            if self._adapters is None:
                raise ModelError("no adapters are served here: max_loras is 0")
            self._adapters.put(order.place, Path(order.path), order.digest)
        except ModelError as refusal:
            error = str(refusal)
        except Exception as failure:
            log.exception("adapter_failed", path=order.path, reason=repr(failure))
            error = f"the adapter cannot be read: {failure!r}"
        return AdapterHeld(order.number, self.number, error)


def build_part(
    place: Place, backend: Backend, spec: ModelSpec, source: WeightSource, *, max_positions: int, reads_all: bool
) -> NativeDecoder:
    """A rank's part of the model.  `reads_all`: a digest of the whole checkpoint is wanted.

    Raises ConfigError without native kernels, or where experts that stay whole are not alike.
    """
    if backend.native is None:
        why = backend.no_native or f"the model runs on {backend.device.type}"
        raise ConfigError(f"tensor_parallel_size is {place.ranks}, which needs native kernels, but {why}; {WITH_TORCH}")
    part = RankSource(source, spec, place)
    decoder = build_native(
        cut_spec(spec, place),
        part,
        backend.formats,
        backend.native,
        max_positions=max_positions,
        firsts=firsts_of(spec, place),
    )
    if reads_all:
        part.read_others()
    return decoder


def join(
    ranks: Ranks,
    settings: Settings,
    backend: Backend,
    spec: ModelSpec,
    part: NativeDecoder,
    plan: MemoryPlan,
    fingerprint: Fingerprint,
) -> tuple[RankDecoder, MemoryPlan]:
    """The rank's model, and the plan that all ranks go by.  Raises ConfigError and FatalError as `Ranks.settle`."""
    native, scheduling = backend.native, settings.scheduling
    assert native is not None
    rows = most_positions(scheduling, settings.speculation)
    held: list[object] = []
    whole = describe_whole(spec, backend.formats, plan.block_size, held)
    group = make_group(
        spec,
        ranks.place,
        max_tokens=max(MOST_TOKENS, 2 * scheduling.max_num_batched_tokens),
        max_seqs=plan.states.num_rows,
        max_rows=rows,
        table_columns=-(-plan.max_model_len // plan.block_size) * (1 + len(plan.windows)),
        expert_bytes=native.expert_bytes(whole),
        slot_bytes=native.slot_bytes(whole) if settings.engine.enable_expert_parallel else 0,
        digest=0,
        sequence_parallel=settings.engine.enable_sequence_parallel,
        crowded=settings.engine.ranks_here * backend.num_threads > usable_cores(),
    )
    num_bytes, experts = native.group_bytes(group, spec.hidden_size), _digest_of_experts(settings.engine, part)
    start, plan = settle(ranks, plan, fingerprint, num_bytes, experts)
    group.table_columns = -(-plan.max_model_len // plan.block_size) * (1 + len(plan.windows))
    group.digest = start.digest
    shared = mmap.mmap(ranks.memory, start.num_bytes)
    model = RankDecoder(part, native, group, shared, ranks.links)
    if settings.engine.enable_eplb and ranks.place.leads:
        model.balance_experts(settings.engine.eplb_step_interval, _log_moves)
    ranks.joined(model)
    return model, plan


def _log_moves(planned: PlannedMoves) -> None:
    log.info(
        "experts_move",
        layers=planned.layers,
        moves=planned.moves,
        balance=round(planned.balance, 3),
        balance_then=round(planned.balance_then, 3),
    )


def _digest_of_experts(settings: EngineSettings, part: NativeDecoder) -> str:
    """Raises ConfigError where experts are to be moved, but those of a layer are not packed alike."""
    said = [str((settings.enable_eplb, settings.num_redundant_experts, settings.eplb_step_interval))]
    for number, experts in part.whole_experts if settings.enable_eplb else ():
        if len(experts.packings) > 1:
            raise ConfigError(
                f"enable_eplb is set, but layer {number} has experts that are packed in several ways, by their content"
            )
        said += map(str, experts.packings)
    return hashlib.blake2b("\n".join(said).encode(), digest_size=8).hexdigest()


def settle(
    ranks: Ranks, plan: MemoryPlan, fingerprint: Fingerprint, num_bytes: int = 0, experts: str = ""
) -> tuple[GroupStart, MemoryPlan]:
    """What all ranks go by, and this rank's plan after it; the two last as `Ranks.settle` and `RankReady` have them."""
    own = RankReady(ranks.number, "", fingerprint, plan.num_blocks, plan.max_model_len, plan.windows, experts)
    start = ranks.settle(own, num_bytes)
    return start, smallest(plan, start)


def smallest(plan: MemoryPlan, start: GroupStart) -> MemoryPlan:
    """A rank's plan, of the blocks that all ranks have."""
    both = zip(plan.sliding, start.sliding, strict=True)
    return dataclasses.replace(
        plan,
        num_blocks=start.num_blocks,
        max_model_len=start.max_model_len,
        sliding=tuple(dataclasses.replace(one, num_blocks=count) for one, (_, count) in both),
    )
