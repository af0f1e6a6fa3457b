"""Assembles the model runner from the settings: files, weights, kernels, memory.

The worker's shell calls `load_runner(settings)` and uses nothing else of torch.  A draft calls `load_model`, for the
same without plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog
import torch
from torch import Tensor

from engine.description.names import Part, TensorMap
from engine.description.ranks import cut_tensors
from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from engine.execution.adapters import AdapterBank
from engine.execution.constraints.row_automata import RowAutomata
from engine.execution.outputs.pooling import Classifier
from engine.execution.runner import ModelRunner
from engine.execution.tables.device_tables import DeviceTables
from engine.execution.tables.row_states import RowStates
from engine.execution.tables.rows import RowTable
from engine.heads.drafter import HeadDrafter
from engine.heads.model import HeadModel
from engine.loading.backend import Backend
from engine.loading.graphs import GraphedDecoder, Size
from engine.loading.memory import MemoryPlan, block_bytes, cpu_budget, gpu_budget, plan_memory
from engine.loading.profile import peak_activation
from engine.loading.ranks import Ranks, join
from engine.loading.reading import KeptPart, place_of, read_model
from engine.loading.stages import StageRanks, join_ranked_stages, join_stages
from engine.loading.torch_ranks import join_torch
from engine.loading.vocabulary import GrammarVocabulary
from engine.lora.adapter import Take, read_adapter
from engine.modeling.kv_pool import KVPool
from engine.modeling.model import HoldsAdapters, KeepsStates, Model
from engine.modeling.pool_backing import IdleTime
from engine.modeling.ranks.ranks import RankDecoder
from engine.modeling.ranks.torch_ranks import TorchRankDecoder
from engine.sampling.sampler import Sampler
from engine.weights.digest import DigestMemory, user_memory
from engine.weights.formats import name_of
from engine.weights.source import Progress, open_weights
from shared.config import AdapterSettings, MemorySettings, Settings
from shared.errors import ConfigError
from shared.messages.control import SlidingPool, WorkerCapacity
from shared.messages.fingerprint import Fingerprint
from shared.text.model_source import resolve_model_dir

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
    kept: KeptPart | None = None,
    prepares: bool = False,
) -> ModelRunner:
    """A runner ready for plans; `has_windows`, `ranks` and `kept` as in `load_model`.  `prepares`: it reads meanwhile
    what the first request with a grammar would wait for.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
    directory = resolve_model_dir(settings.engine.model)
    vocabulary = GrammarVocabulary(directory, read_config(directory).vocab_size)
    if prepares:
        vocabulary.prepare()
    loaded = load_model(
        settings, progress=progress, digests=user_memory(), has_windows=has_windows, ranks=ranks, kept=kept
    )
    return make_runner(settings, loaded, vocabulary)


def make_runner(settings: Settings, loaded: LoadedModel, vocabulary: GrammarVocabulary | None = None) -> ModelRunner:
    """`vocabulary`: of the same checkpoint."""
    idle = IdleTime()
    idle.pause()  # until an epoch begins
    if vocabulary is None:
        vocabulary = GrammarVocabulary(resolve_model_dir(settings.engine.model), loaded.model.spec.vocab_size)
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
        automata=RowAutomata(vocabulary, vocab_size=capacity.vocab_size),
        idle=idle,
    )


def load_model(
    settings: Settings,
    *,
    longest: int = 0,
    progress: Progress | None = None,
    digests: DigestMemory | None = None,
    has_windows: bool = False,
    ranks: Ranks | StageRanks | None = None,
    kept: KeptPart | None = None,
) -> LoadedModel:
    """The settings' model, for sequences of up to `longest` tokens where that is less than it could serve; with its
    fingerprint where there is a memory for digests.  `has_windows`: layers that see a window have blocks of their own.
    `ranks`: the others of a group in which this process has a part of the model.  `kept`: what it read for a group
    before, or gets what it reads now.

    Raises ModelError for the checkpoint's faults, ConfigError for the settings'.
    """
    read = None if kept is None else kept.read
    if read is None:
        read = read_model(settings, longest, progress, digests, ranks)
        if kept is not None:
            kept.read = read
    spec, backend, model = read.spec, read.backend, read.model
    shared = spec if backend.device.type == "cpu" else model.spec  # each rank has a GPU, all together one CPU's memory
    layer_bytes = backend.layout(shared).layer_bytes(settings.memory.block_size)
    windows = spec.windows(read.max_model_len) if has_windows else ()
    plan = plan_pool(settings, model, read.max_model_len, windows, layer_bytes, read.head, spec)
    if ranks is not None and read.part is not None and read.fingerprint is not None:
        if isinstance(read.part, TorchRankDecoder):
            assert not isinstance(ranks, StageRanks)
            model, plan = join_torch(ranks, read.part, plan, read.fingerprint)
        elif isinstance(ranks, StageRanks):
            model, plan = join_ranked_stages(ranks, settings, backend, spec, read.part, plan, read.fingerprint)
        elif settings.engine.has_stages:
            model, plan = join_stages(ranks, read.part, plan, read.fingerprint)
        else:
            model, plan = join(ranks, settings, backend, spec, read.part, plan, read.fingerprint)
    log.info("memory_planned", num_blocks=plan.num_blocks, num_tokens=plan.num_tokens, summary=str(plan))
    take = partial(_take, settings.engine.load_format, read.directory, spec)
    tensors, adapters = read.source.tensors, None
    own = None if isinstance(ranks, StageRanks) or settings.engine.has_stages else ranks
    if own is not None and isinstance(model, RankDecoder):
        tensors = cut_tensors(spec, tensors, place_of(settings.engine, own))
    if digests is not None and own is ranks:
        adapters = make_bank(settings.adapters, model, spec, tensors, take)
    if adapters is not None and own is not None:
        own.serve(adapters)
    found = assemble(settings, model, backend, plan, read.fingerprint, adapters, read.head)
    return msgspec.structs.replace(found, classifier=read.classifier)


def _take(load_format: str, directory: Path, spec: ModelSpec, part: Part) -> Tensor:
    return open_weights(load_format, directory, spec).take(part)


def make_bank(
    settings: AdapterSettings, model: Model, spec: ModelSpec, tensors: TensorMap, take: Take | None = None
) -> AdapterBank | None:
    """None where no adapters are served.  `spec`: of the whole model; `tensors`: those of which the model has
    something.  `take` reads one of the base model's tensors."""
    if not settings.max_loras or not isinstance(model, HoldsAdapters):
        return None
    return AdapterBank(
        model,
        lambda directory, rank: read_adapter(directory, spec, tensors, max_rank=rank, take=take),
        count=settings.num_held,
        max_rank=settings.max_lora_rank,
    )


def show_progress(sizes: Sequence[Size]) -> Iterable[Size]:
    """A progress bar, on a terminal only."""
    if not sys.stderr.isatty():
        return sizes
    from tqdm import tqdm

    return tqdm(sizes, desc="capturing graphs", unit="graph", leave=False)


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
        budget = _gpu_budget(settings, model, max_model_len)
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


def _gpu_budget(settings: Settings, model: Model, max_model_len: int) -> int:
    """What is not torch's (the driver's context, other processes) is taken too; graphs take what their steps do."""
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(model.device)
    peak = peak_activation(model, settings, max_model_len)
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
