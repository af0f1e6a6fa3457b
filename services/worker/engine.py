"""Assembles a model runner from the settings: files, weights, kernels, memory.

`load_runner(settings)` is what the worker's shell calls; the shell knows nothing else of torch.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import torch
from torch import Tensor

from kernels.provider import Kernels, select_kernels
from services.worker.memory import MemoryPlan, cpu_budget, gpu_budget, plan_memory
from services.worker.profile import peak_activation
from services.worker.rows import RowTable
from services.worker.runner import ModelRunner
from shared.config import Settings
from shared.errors import ConfigError
from shared.messages.control import WorkerCapacity
from shared.model_source import resolve_model_dir
from shared.modeling.assembly import build_decoder
from shared.modeling.config import ModelConfig, read_config
from shared.modeling.dtype import resolve_device, resolve_dtype
from shared.modeling.kv_pool import KVPool, bytes_per_block
from shared.modeling.llama import Decoder
from shared.modeling.sampler import Sampler
from shared.modeling.weights import Progress, load_weights, make_weights

log = structlog.get_logger()


def load_runner(settings: Settings, *, progress: Progress | None = None) -> ModelRunner:
    """A runner ready for plans.  Raises ModelError for the checkpoint's faults, ConfigError for the settings'."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    directory = resolve_model_dir(settings.model)
    config = read_config(directory)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, config.dtype, device)
    max_model_len = _wanted_model_len(settings, config)
    weights = _weights(settings, directory, config, dtype, device, progress)
    kernels = select_kernels(device, dtype)
    model = build_decoder(config, weights, kernels, max_positions=max_model_len)
    plan = _plan_memory(settings, model, dtype, max_model_len)
    log.info("model_loaded", model=settings.model_name, device=str(device), dtype=str(dtype), kernels=kernels.name)
    log.info("memory_planned", num_blocks=plan.num_blocks, num_tokens=plan.num_tokens, summary=str(plan))
    return _assemble(settings, config, model, kernels, plan, dtype)


def _wanted_model_len(settings: Settings, config: ModelConfig) -> int:
    if settings.max_model_len > config.longest_model_len:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, more than the model's {config.longest_model_len} positions"
        )
    return settings.max_model_len or config.max_position_embeddings


def _weights(
    settings: Settings,
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, Tensor]:
    if settings.load_format == "dummy":
        return make_weights(config, dtype=dtype, device=device)
    return load_weights(directory, config, dtype=dtype, device=device, progress=progress)


def _plan_memory(settings: Settings, model: Decoder, dtype: torch.dtype, max_model_len: int) -> MemoryPlan:
    config = model.config
    block_bytes = bytes_per_block(
        num_layers=config.num_layers,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    if settings.num_blocks:
        budget = 0
    elif model.device.type == "cpu":
        budget = cpu_budget(settings)
    else:
        budget = _gpu_budget(settings, model, dtype)
    return plan_memory(settings, bytes_per_block=block_bytes, budget=budget, max_model_len=max_model_len)


def _gpu_budget(settings: Settings, model: Decoder, dtype: torch.dtype) -> int:
    weights = torch.cuda.memory_allocated(model.device)
    peak = peak_activation(model, settings, dtype)
    total = torch.cuda.get_device_properties(model.device).total_memory
    return gpu_budget(settings, total=total, weights=weights, peak_activation=peak)


def _assemble(
    settings: Settings, config: ModelConfig, model: Decoder, kernels: Kernels, plan: MemoryPlan, dtype: torch.dtype
) -> ModelRunner:
    pool = KVPool(
        num_layers=config.num_layers,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=model.device,
    )
    table = RowTable(
        num_rows=settings.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=config.vocab_size,
        device=model.device,
    )
    capacity = WorkerCapacity(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.max_model_len,
        vocab_size=config.vocab_size,
        model=settings.model_name,
        dtype=str(dtype).removeprefix("torch."),
        device=model.device.type,
    )
    return ModelRunner(model=model, pool=pool, table=table, sampler=Sampler(kernels.gumbel_argmax), capacity=capacity)
