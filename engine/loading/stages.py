"""How the stages of a pipeline come together: as ranks do (`engine.loading.ranks`), but that they share no memory.

A stage may be a group of ranks itself.  Then these agree first, and what they have in common is what their leader, one
of the stages to the others, says that it has.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.description.ranks import Place, cut_spec
from engine.description.spec import ModelSpec
from engine.description.stages import Stage
from engine.loading.backend import Backend
from engine.loading.memory import MemoryPlan
from engine.loading.ranks import Ranks, join, settle
from engine.modeling.native.decoder import NativeDecoder, build_native
from engine.modeling.ranks.ranks import RankDecoder, firsts_of
from engine.modeling.ranks.stages import FollowingStage, StagedDecoder
from engine.weights.part_source import RankSource, StageSource
from engine.weights.source import WeightSource
from shared.config import Settings
from shared.errors import ConfigError
from shared.messages.fingerprint import Fingerprint


@dataclass
class StageRanks:
    """Of a rank in a stage that is a group of ranks: its way to the others of the stage, and to the other stages."""

    stage: Place
    ranks: Ranks
    stages: Ranks | None  # None: this rank does not lead its stage


def build_stage(
    place: Place,
    backend: Backend,
    spec: ModelSpec,
    source: WeightSource,
    *,
    max_positions: int,
    reads_all: bool,
    rank: Place | None = None,
) -> NativeDecoder:
    """The layers of a stage, or a rank's part of them.  `reads_all`: a digest of the whole checkpoint is wanted.

    Raises ConfigError without native kernels, or where experts that stay whole are not alike.
    """
    if backend.native is None:
        why = backend.no_native or f"the model runs on {backend.device.type}"
        raise ConfigError(f"pipeline_parallel_size is {place.ranks}, which needs native kernels, but {why}")
    stage = Stage.of(place, spec)
    part = StageSource(source if rank is None else RankSource(source, spec, rank), stage)
    firsts = None if rank is None else firsts_of(spec, rank)
    decoder = build_native(
        stage.cut_spec(spec if rank is None else cut_spec(spec, rank)),
        part,
        backend.formats,
        backend.native,
        max_positions=max_positions,
        firsts=firsts and dataclasses.replace(firsts, layers=firsts.layers[stage.layers]),
        begins=stage.begins,
        ends=stage.ends,
    )
    if reads_all:
        part.read_others()
    return decoder


def join_stages(
    ranks: Ranks, part: NativeDecoder, plan: MemoryPlan, fingerprint: Fingerprint
) -> tuple[StagedDecoder, MemoryPlan]:
    """The rank's model, and the plan that all ranks go by.  Raises ConfigError and FatalError as `Ranks.settle`."""
    start, plan = settle(ranks, plan, fingerprint)
    return _make_stage(ranks, part, plan, start.digest), plan


def join_ranked_stages(
    ranks: StageRanks,
    settings: Settings,
    backend: Backend,
    spec: ModelSpec,
    part: NativeDecoder,
    plan: MemoryPlan,
    fingerprint: Fingerprint,
) -> tuple[StagedDecoder | RankDecoder, MemoryPlan]:
    """The same where each stage is a group of ranks."""
    model, plan = join(ranks.ranks, settings, backend, spec, part, plan, fingerprint)
    return (model if ranks.stages is None else _make_stage(ranks.stages, model, plan, model.agreed)), plan


def _make_stage(stages: Ranks, decoder: NativeDecoder | RankDecoder, plan: MemoryPlan, agreed: int) -> StagedDecoder:
    first = agreed >> 1  # orders are counted from there
    model = (
        StagedDecoder(decoder, stages.links, first)
        if stages.place.leads
        else FollowingStage(decoder, stages.links[0], first, max_seqs=plan.states.num_rows, longest=plan.max_model_len)
    )
    stages.joined(model)
    return model
