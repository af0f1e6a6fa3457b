"""Assembles the model runner from the settings: files, weights, kernels, memory.

The worker's shell calls `load_runner(settings)` and uses nothing else of torch.  A draft calls `load_model`, for the
same without plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import structlog
import torch
from torch import Tensor

from engine.description.names import Part, TensorMap
from engine.description.ranks import why_not_in_torch
from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from engine.description.stages import why_not_divided
from engine.execution.adapters import AdapterBank
from engine.execution.device_tables import DeviceTables
from engine.execution.pooling import Classifier
from engine.execution.row_automata import RowAutomata
from engine.execution.row_states import RowStates
from engine.execution.rows import RowTable
from engine.execution.runner import ModelRunner
from engine.heads.drafter import HeadDrafter
from engine.heads.model import HeadModel
from engine.loading.backend import Backend, choose_backend
from engine.loading.fingerprint import DigestedSource, make_fingerprint
from engine.loading.graphs import CudaRecorder, GraphedDecoder, Size
from engine.loading.heads import build_head, find_head
from engine.loading.memory import MemoryPlan, block_bytes, cpu_budget, gpu_budget, plan_memory
from engine.loading.profile import most_positions, peak_activation
from engine.loading.ranks import Ranks, build_part, join
from engine.loading.stages import StageRanks, build_stage, join_ranked_stages, join_stages
from engine.loading.torch_ranks import build_torch_part, join_torch
from engine.lora.adapter import LoraAdapter, Take, read_adapter
from engine.modeling.assembly import build_decoder
from engine.modeling.decoder import Decoder
from engine.modeling.kv_pool import KVPool
from engine.modeling.model import HoldsAdapters, KeepsStates, Model
from engine.modeling.native import NativeDecoder, build_native
from engine.modeling.torch_ranks import TorchRankDecoder
from engine.sampling.sampler import Sampler
from engine.weights.digest import DigestMemory, user_memory
from engine.weights.formats import name_of
from engine.weights.source import Progress, WeightSource, has_codes, open_weights
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.config import AdapterSettings, MemorySettings, SchedulingSettings, Settings
from shared.errors import ConfigError
from shared.messages.control import SlidingPool, WorkerCapacity
from shared.messages.fingerprint import Fingerprint
from shared.model_source import resolve_model_dir

MAX_GRAPH_TOKENS = 512  # beyond, a step takes so long that its launches do not show

log = structlog.get_logger()


class LoadedModel(msgspec.Struct, frozen=True):
    """A model with memory of its own, and the tables of the rows that it can serve."""

    model: Model
    pool: KVPool
    table: RowTable
    sampler: Sampler
    backend: Backend
    plan: MemoryPlan
    fingerprint: Fingerprint | None = None  # where it was asked for
    adapters: AdapterBank | None = None
    classifier: Classifier | None = None
    drafter: HeadDrafter | None = None


def load_runner(
    settings: Settings,
    *,
    progress: Progress | None = None,
    has_windows: bool = True,
    ranks: Ranks | StageRanks | None = None,
) -> ModelRunner:
    """A runner ready for plans; `has_windows` and `ranks` as in `load_model`.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
    loaded = load_model(settings, progress=progress, digests=user_memory(), has_windows=has_windows, ranks=ranks)
    return make_runner(settings, loaded)


def make_runner(settings: Settings, loaded: LoadedModel) -> ModelRunner:
    capacity = WorkerCapacity(
        num_blocks=loaded.plan.num_blocks,
        sliding=[SlidingPool(window, num_blocks) for window, num_blocks in loaded.plan.windows],
        block_size=loaded.plan.block_size,
        max_num_seqs=loaded.plan.states.num_rows,
        max_model_len=loaded.plan.max_model_len,
        vocab_size=loaded.model.spec.vocab_size,
        model=settings.engine.model_name,
        dtype=name_of(loaded.backend.formats.compute),
        device=loaded.model.device.type,
        keeps_states=loaded.model.spec.has_states,
        num_snapshots=loaded.plan.states.num_snapshots,
        max_loras=settings.adapters.max_loras if loaded.adapters is not None else 0,
        num_held_loras=loaded.adapters.count if loaded.adapters is not None else 0,
        labels=list(loaded.model.spec.labels),
        max_head_drafts=0 if loaded.drafter is None else loaded.drafter.most,
    )
    return ModelRunner(
        model=loaded.model,
        pool=loaded.pool,
        table=loaded.table,
        sampler=loaded.sampler,
        capacity=capacity,
        fingerprint=loaded.fingerprint,
        no_native=loaded.backend.no_native,
        adapters=loaded.adapters,
        classifier=loaded.classifier,
        drafter=loaded.drafter,
        automata=RowAutomata(
            partial(_load_vocabulary, settings.engine.model, capacity.vocab_size), vocab_size=capacity.vocab_size
        ),
    )


def _load_vocabulary(model: str, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    return load_vocabulary(resolve_model_dir(model), size, eos_token_ids)


def load_model(
    settings: Settings,
    *,
    longest: int = 0,
    progress: Progress | None = None,
    digests: DigestMemory | None = None,
    has_windows: bool = False,
    ranks: Ranks | StageRanks | None = None,
) -> LoadedModel:
    """The settings' model, for sequences of up to `longest` tokens where that is less than it could serve; with its
    fingerprint where there is a memory for digests.  `has_windows`: layers that see a window have blocks of their own.
    `ranks`: the others of a group in which this process has a part of the model.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
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
    shared = spec if backend.device.type == "cpu" else model.spec  # each rank has a GPU, all together one CPU's memory
    layer_bytes = backend.layout(shared).layer_bytes(settings.memory.block_size)
    windows = spec.windows(max_model_len) if has_windows else ()
    plan = plan_pool(settings, model, max_model_len, windows, layer_bytes, head, spec)
    if ranks is not None and part is not None and fingerprint is not None:
        if isinstance(part, TorchRankDecoder):
            assert not isinstance(ranks, StageRanks)
            model, plan = join_torch(ranks, part, plan, fingerprint)
        elif isinstance(ranks, StageRanks):
            model, plan = join_ranked_stages(ranks, settings, backend, spec, part, plan, fingerprint)
        elif settings.engine.has_stages:
            model, plan = join_stages(ranks, part, plan, fingerprint)
        else:
            model, plan = join(ranks, settings, backend, spec, part, plan, fingerprint)
    log.info("memory_planned", num_blocks=plan.num_blocks, num_tokens=plan.num_tokens, summary=str(plan))
    take = partial(_take, settings.engine.load_format, directory, spec)
    adapters = None if digests is None else make_bank(settings.adapters, model, source.tensors, take)
    found = assemble(settings, model, backend, plan, fingerprint, adapters, head)
    return msgspec.structs.replace(found, classifier=classifier)


def check_ranks(settings: Settings, spec: ModelSpec) -> None:
    """Raises ConfigError where the model cannot be cut into as many ranks as are asked for."""
    engine = settings.engine
    stages, ranks = engine.pipeline_parallel_size, engine.tensor_parallel_size
    whole, redundant = engine.enable_expert_parallel, engine.num_redundant_experts
    why = why_not_divided(spec, stages, ranks, whole_experts=whole, redundant=redundant)
    if why := why or (why_not_in_torch(spec) if engine.has_torch_ranks else ""):
        raise ConfigError(why)


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
    place = replace(own.place, whole_experts=engine.enable_expert_parallel, redundant=engine.num_redundant_experts)
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


def _take(load_format: str, directory: Path, spec: ModelSpec, part: Part) -> Tensor:
    return open_weights(load_format, directory, spec).take(part)


def make_bank(
    settings: AdapterSettings, model: Model, tensors: TensorMap, take: Take | None = None
) -> AdapterBank | None:
    """None where no adapters are served.  `take` reads one of the base model's tensors."""
    if not settings.max_loras or not isinstance(model, HoldsAdapters):
        return None
    read = partial(_read_adapter, model.spec, tensors, take)
    return AdapterBank(model, read, count=settings.num_held, max_rank=settings.max_lora_rank)


def _read_adapter(
    spec: ModelSpec, tensors: TensorMap, take: Take | None, directory: Path, max_rank: int
) -> LoraAdapter:
    return read_adapter(directory, spec, tensors, max_rank=max_rank, take=take)


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


def show_progress(sizes: Sequence[Size]) -> Iterable[Size]:
    """A progress bar, on a terminal only."""
    if not sys.stderr.isatty():
        return sizes
    from tqdm import tqdm

    return tqdm(sizes, desc="capturing graphs", unit="graph", leave=False)


def _wanted_model_len(settings: SchedulingSettings, spec: ModelSpec) -> int:
    if settings.max_model_len > spec.longest_model_len:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, more than the model's {spec.longest_model_len} positions"
        )
    return settings.max_model_len or spec.max_position_embeddings


def plan_pool(
    settings: Settings,
    model: Model,
    max_model_len: int,
    windows: Sequence[int] = (),
    layer_bytes: Sequence[int] | None = None,
    head: HeadModel | None = None,
    spec: ModelSpec | None = None,
) -> MemoryPlan:
    """`windows`: those of layers with blocks of their own; `layer_bytes`: of a block in each layer of `spec`, where the
    model is a part of the worker's."""
    if settings.memory.num_blocks:
        budget = 0
    elif model.device.type == "cpu":
        budget = cpu_budget(settings.memory)
    else:
        budget = _gpu_budget(settings, model)
    layer_bytes = layer_bytes or model.layer_bytes(settings.memory.block_size)
    first, sliding = block_bytes(spec or model.spec, layer_bytes, windows)
    first += 0 if head is None else HeadDrafter.block_bytes(head, settings.memory.block_size)
    return plan_memory(
        settings.memory,
        settings.scheduling,
        bytes_per_block=first,
        budget=budget,
        max_model_len=max_model_len,
        sliding=sliding,
        bytes_per_state=model.state_bytes if isinstance(model, KeepsStates) else 0,
    )


def _gpu_budget(settings: Settings, model: Model) -> int:
    """What is not torch's (the driver's context, other processes) is taken too; graphs take what their steps do."""
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(model.device)
    peak = peak_activation(model, settings)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    elsewhere = max(0, total - free - torch.cuda.memory_reserved(model.device))
    if isinstance(model, GraphedDecoder):
        peak += peak * model.max_tokens // settings.scheduling.max_num_batched_tokens
    return gpu_budget(settings.memory, total=total, weights=weights + elsewhere, peak_activation=peak)


def _allocate(settings: MemorySettings, model: Model, plan: MemoryPlan) -> KVPool:
    """Raises ConfigError where the size was set and cannot be allocated: a restart would not help."""
    try:
        return model.allocate(plan.num_blocks, plan.block_size, plan.windows, plan.states.num_states)
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:  # torch's lack of memory is a RuntimeError
        if not (settings.kv_cache_memory or settings.num_blocks):
            raise
        raise ConfigError(f"{plan} cannot be allocated ({error}); lower kv_cache_memory or num_blocks") from error


def assemble(
    settings: Settings,
    model: Model,
    backend: Backend,
    plan: MemoryPlan,
    fingerprint: Fingerprint | None = None,
    adapters: AdapterBank | None = None,
    head: HeadModel | None = None,
) -> LoadedModel:
    width = -(-plan.max_model_len // plan.block_size) * (1 + len(plan.windows))
    num_rows, states = plan.states.num_rows, None
    if isinstance(model, KeepsStates) and model.spec.has_states:
        states = RowStates(model, num_rows, plan.states.num_snapshots)
    tables = None
    if isinstance(model, GraphedDecoder):
        tables = DeviceTables(num_rows, width, model.device, backend.kernels.write_rows)
    table = RowTable(
        num_rows=num_rows,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=model.spec.vocab_size,
        device=model.device,
        device_tables=tables,
        sliding=plan.windows,
        states=states,
        adapters=adapters,
    )
    pool, sampler, drafter = _allocate(settings.memory, model, plan), Sampler(backend.sampling), None
    if head is not None:
        most = settings.speculation.max_num_draft_tokens
        drafter = HeadDrafter(head, table, sampler, num_blocks=plan.num_blocks, most=most)
        drafter.join(pool)
    if isinstance(model, GraphedDecoder) and tables is not None:
        model.capture(table.tokens, tables.table, plan.block_size, progress=show_progress)
        log.info("graphs_captured", num_graphs=model.num_graphs)
    return LoadedModel(
        model, pool, table, sampler, backend, plan, fingerprint, adapters, classifier=None, drafter=drafter
    )
