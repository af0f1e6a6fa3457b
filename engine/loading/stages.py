"""How the stages of a pipeline come together: as ranks do (`engine.loading.ranks`), but that they share no memory."""

from __future__ import annotations

from engine.description.ranks import Place
from engine.description.spec import ModelSpec
from engine.description.stages import Stage
from engine.loading.backend import Backend
from engine.loading.memory import MemoryPlan
from engine.loading.ranks import RankReady, Ranks, smallest
from engine.modeling.native import NativeDecoder, build_native
from engine.modeling.stages import FollowingStage, StagedDecoder
from engine.weights.source import WeightSource
from engine.weights.stage_source import StageSource
from shared.errors import ConfigError
from shared.messages.fingerprint import Fingerprint


def build_stage(
    place: Place, backend: Backend, spec: ModelSpec, source: WeightSource, *, max_positions: int, reads_all: bool
) -> NativeDecoder:
    """A rank's layers.  `reads_all`: a digest of the whole checkpoint is wanted.  Raises ConfigError without native
    kernels."""
    if backend.native is None:
        why = backend.no_native or f"the model runs on {backend.device.type}"
        raise ConfigError(f"pipeline_parallel_size is {place.ranks}, which needs native kernels, but {why}")
    stage = Stage.of(place, spec)
    part = StageSource(source, stage)
    decoder = build_native(
        stage.cut_spec(spec),
        part,
        backend.formats,
        backend.native,
        max_positions=max_positions,
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
    own = RankReady(ranks.place.rank, "", fingerprint, plan.num_blocks, plan.max_model_len, plan.windows)
    start = ranks.settle(own, 0)
    plan = smallest(plan, start)
    first = start.digest >> 1  # orders are counted from there
    model = (
        StagedDecoder(part, ranks.links, first)
        if ranks.place.leads
        else FollowingStage(part, ranks.links[0], first, max_seqs=plan.states.num_rows, longest=plan.max_model_len)
    )
    ranks.joined(model)
    return model, plan
