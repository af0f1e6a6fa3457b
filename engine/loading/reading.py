"""Reads a checkpoint into a model, or into a rank's part of one, before there is memory for what it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from engine.description.ranks import Place, why_not_in_torch
from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from engine.description.stages import why_not_divided
from engine.execution.outputs.pooling import Classifier
from engine.heads.model import HeadModel
from engine.loading.backend import Backend, choose_backend
from engine.loading.fingerprint import DigestedSource, make_fingerprint
from engine.loading.graphs import CudaRecorder, GraphedDecoder
from engine.loading.heads import build_head, find_head
from engine.loading.profile import most_positions
from engine.loading.ranks import Ranks, build_part
from engine.loading.stages import StageRanks, build_stage
from engine.loading.torch_ranks import build_torch_part
from engine.modeling.model import Model
from engine.modeling.native.decoder import NativeDecoder, build_native
from engine.modeling.ranks.torch_ranks import TorchRankDecoder
from engine.modeling.torch_decoder.assembly import build_decoder
from engine.modeling.torch_decoder.decoder import Decoder
from engine.weights.digest import DigestMemory
from engine.weights.source import Progress, WeightSource, has_codes, open_weights
from shared.config import EngineSettings, SchedulingSettings, Settings
from shared.errors import ConfigError
from shared.messages.fingerprint import Fingerprint
from shared.text.model_source import resolve_model_dir

MAX_GRAPH_TOKENS = 512  # beyond, a step takes so long that its launches do not show

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadModel:
    """What has been read of a checkpoint, before there is memory for what it computes."""

    directory: Path
    spec: ModelSpec
    max_model_len: int
    source: WeightSource
    backend: Backend
    model: Model
    part: NativeDecoder | TorchRankDecoder | None  # of a group
    classifier: Classifier | None
    fingerprint: Fingerprint | None
    head: HeadModel | None


@dataclass(slots=True)
class KeptPart:
    """What a rank has read, for the next group that it is in, where one ends without it."""

    read: ReadModel | None = None


def read_model(
    settings: Settings,
    longest: int,
    progress: Progress | None,
    digests: DigestMemory | None,
    ranks: Ranks | StageRanks | None,
) -> ReadModel:
    """As `engine.loading.load.load_model` has it.  Raises ModelError and ConfigError."""
    directory = resolve_model_dir(settings.engine.model)
    spec = read_config(directory)
    check_ranks(settings, spec)
    found_head = None if digests is None else find_head(settings, directory, spec)
    max_model_len = _wanted_model_len(settings.scheduling, spec)
    max_model_len = min(max_model_len, longest or max_model_len)
    source = open_weights(settings.engine.load_format, directory, spec, progress=progress)
    codes = has_codes(spec, source)
    backend = choose_backend(settings, spec, source.dtype, quantised=source.quantisation is not None, codes=codes)
    watched = DigestedSource(source, backend.native, digests) if digests is not None else None
    part = None if ranks is None else _build_part(settings, ranks, backend, spec, source, max_model_len, watched)
    model = with_graphs(settings, backend, part or build(backend, spec, source, max_model_len))
    classifier = read_classifier(spec, source, backend.device)
    fingerprint = None
    if watched is not None:
        fingerprint = make_fingerprint(settings, directory, spec, source.quantisation, backend, watched.value())
    log.info("model_loaded", model=settings.engine.model_name, **backend.description)
    head = None if found_head is None else build_head(settings, found_head, directory, model, backend, max_model_len)
    return ReadModel(directory, spec, max_model_len, source, backend, model, part, classifier, fingerprint, head)


def check_ranks(settings: Settings, spec: ModelSpec) -> None:
    """Raises ConfigError where the model cannot be cut into as many ranks as are asked for."""
    engine = settings.engine
    stages, ranks = engine.pipeline_parallel_size, engine.tensor_parallel_size
    whole, redundant = engine.enable_expert_parallel, engine.num_redundant_experts
    why = why_not_divided(spec, stages, ranks, whole_experts=whole, redundant=redundant)
    if why := why or (why_not_in_torch(spec) if engine.has_torch_ranks else ""):
        raise ConfigError(why)


def place_of(engine: EngineSettings, ranks: Ranks) -> Place:
    return replace(ranks.place, whole_experts=engine.enable_expert_parallel, redundant=engine.num_redundant_experts)


def _build_part(
    settings: Settings,
    ranks: Ranks | StageRanks,
    backend: Backend,
    spec: ModelSpec,
    source: WeightSource,
    max_model_len: int,
    watched: DigestedSource | None,
) -> NativeDecoder | TorchRankDecoder:
    reads_all = watched is not None and watched.is_reading
    own = ranks.ranks if isinstance(ranks, StageRanks) else ranks
    engine = settings.engine
    place = place_of(engine, own)
    if engine.has_torch_ranks:
        return build_torch_part(
            engine, own.place, backend, spec, source, max_positions=max_model_len, reads_all=reads_all
        )
    if isinstance(ranks, StageRanks):
        stage, rank = ranks.stage, place
    elif settings.engine.has_stages:
        stage, rank = ranks.place, None
    else:
        return build_part(place, backend, spec, source, max_positions=max_model_len, reads_all=reads_all)
    return build_stage(stage, backend, spec, source, max_positions=max_model_len, reads_all=reads_all, rank=rank)


def read_classifier(spec: ModelSpec, source: WeightSource, device: torch.device) -> Classifier | None:
    """None where the model generates."""
    part = source.tensors.classifier
    if part is None:
        return None
    weight = source.take(part).to(device, torch.float32, copy=True)
    source.release()
    return Classifier(weight, spec.label_activation)


def build(backend: Backend, spec: ModelSpec, source: WeightSource, max_model_len: int) -> Model:
    if backend.native is not None:
        return build_native(spec, source, backend.formats, backend.native, max_positions=max_model_len)
    return build_decoder(spec, source, backend.formats, backend.kernels, backend.device, max_positions=max_model_len)


def with_graphs(settings: Settings, backend: Backend, model: Model) -> Model:
    """The model, with decodes and verifications replayed as graphs on a GPU whose kernels allow it.

    `enforce_eager` leaves the graphs out.
    """
    able = backend.device.type == "cuda" and backend.kernels.static_attention is not None
    if (
        settings.engine.enforce_eager
        or settings.speculation.has_head
        or not able
        or not isinstance(model, Decoder)
        or model.spec.has_states
    ):
        return model
    longest = 1 if settings.speculation.draft == "off" else 1 + settings.speculation.max_num_draft_tokens
    most = most_positions(settings.scheduling, settings.speculation)
    return GraphedDecoder(model, CudaRecorder(), max_tokens=min(most, MAX_GRAPH_TOKENS), longest=longest)


def _wanted_model_len(settings: SchedulingSettings, spec: ModelSpec) -> int:
    if settings.max_model_len > spec.longest_model_len:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, more than the model's {spec.longest_model_len} positions"
        )
    return settings.max_model_len or spec.max_position_embeddings
