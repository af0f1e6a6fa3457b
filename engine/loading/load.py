"""Assembles the model runner from the settings: files, weights, kernels, memory.

The worker's shell calls `load_runner(settings)` and uses nothing else of torch.  A draft calls `load_model`, for the
same without plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
import structlog
import torch

from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from engine.execution.device_tables import DeviceTables
from engine.execution.row_automata import RowAutomata
from engine.execution.row_states import RowStates
from engine.execution.rows import RowTable
from engine.execution.runner import ModelRunner
from engine.loading.backend import Backend, choose_backend
from engine.loading.fingerprint import DigestedSource, make_fingerprint
from engine.loading.graphs import CudaRecorder, GraphedDecoder, Size
from engine.loading.memory import MemoryPlan, block_bytes, cpu_budget, gpu_budget, plan_memory
from engine.loading.profile import most_positions, peak_activation
from engine.modeling.assembly import build_decoder
from engine.modeling.decoder import Decoder
from engine.modeling.kv_pool import KVPool
from engine.modeling.model import KeepsStates, Model
from engine.modeling.native import build_native
from engine.sampling.sampler import Sampler
from engine.weights.digest import DigestMemory, user_memory
from engine.weights.formats import name_of
from engine.weights.source import Progress, WeightSource, open_weights
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.config import MemorySettings, SchedulingSettings, Settings
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


def load_runner(settings: Settings, *, progress: Progress | None = None, has_windows: bool = True) -> ModelRunner:
    """A runner ready for plans; `has_windows` as in `load_model`.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
    loaded = load_model(settings, progress=progress, digests=user_memory(), has_windows=has_windows)
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
    )
    return ModelRunner(
        model=loaded.model,
        pool=loaded.pool,
        table=loaded.table,
        sampler=loaded.sampler,
        capacity=capacity,
        fingerprint=loaded.fingerprint,
        no_native=loaded.backend.no_native,
        automata=RowAutomata(partial(_load_vocabulary, settings.engine.model, capacity.vocab_size)),
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
) -> LoadedModel:
    """The settings' model, for sequences of up to `longest` tokens where that is less than it could serve; with its
    fingerprint where there is a memory for digests.  `has_windows`: layers that see a window have blocks of their own.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
    directory = resolve_model_dir(settings.engine.model)
    spec = read_config(directory)
    max_model_len = _wanted_model_len(settings.scheduling, spec)
    max_model_len = min(max_model_len, longest or max_model_len)
    source = open_weights(settings.engine.load_format, directory, spec, progress=progress)
    backend = choose_backend(settings, spec, source.dtype, dequantised=source.quantisation is not None)
    watched = DigestedSource(source, backend.native, digests) if digests is not None else None
    model = with_graphs(settings, backend, build(backend, spec, source, max_model_len))
    fingerprint = None
    if watched is not None:
        fingerprint = make_fingerprint(settings, directory, spec, source.quantisation, backend, watched.value())
    log.info("model_loaded", model=settings.engine.model_name, **backend.description)
    plan = plan_pool(settings, model, max_model_len, spec.windows(max_model_len) if has_windows else ())
    log.info("memory_planned", num_blocks=plan.num_blocks, num_tokens=plan.num_tokens, summary=str(plan))
    return assemble(settings, model, backend, plan, fingerprint)


def build(backend: Backend, spec: ModelSpec, source: WeightSource, max_model_len: int) -> Model:
    if backend.native is not None:
        return build_native(spec, source, backend.formats, backend.native, max_positions=max_model_len)
    return build_decoder(spec, source, backend.formats, backend.kernels, backend.device, max_positions=max_model_len)


def with_graphs(settings: Settings, backend: Backend, model: Model) -> Model:
    """The model, with decodes and verifications replayed as graphs on a GPU whose kernels allow it.

    `enforce_eager` leaves the graphs out.
    """
    able = backend.device.type == "cuda" and backend.kernels.static_attention is not None
    if settings.engine.enforce_eager or not able or not isinstance(model, Decoder) or model.spec.has_states:
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


def plan_pool(settings: Settings, model: Model, max_model_len: int, windows: Sequence[int] = ()) -> MemoryPlan:
    """`windows`: those of layers that have blocks of their own."""
    if settings.memory.num_blocks:
        budget = 0
    elif model.device.type == "cpu":
        budget = cpu_budget(settings.memory)
    else:
        budget = _gpu_budget(settings, model)
    first, sliding = block_bytes(model.spec, model.layer_bytes(settings.memory.block_size), windows)
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
    settings: Settings, model: Model, backend: Backend, plan: MemoryPlan, fingerprint: Fingerprint | None = None
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
    )
    pool = _allocate(settings.memory, model, plan)
    if isinstance(model, GraphedDecoder) and tables is not None:
        model.capture(table.tokens, tables.table, plan.block_size, progress=show_progress)
        log.info("graphs_captured", num_graphs=model.num_graphs)
    return LoadedModel(model, pool, table, Sampler(backend.sampling), backend, plan, fingerprint)
