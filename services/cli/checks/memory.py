"""Whether weights and KV cache can be had on a CPU, by the least that they take.

The worker plans to the byte when it has chosen its formats; here only what no choice could mend is refused.  A GPU's
memory is not known without its driver: there the worker says what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.execution.memory import GIB, available_memory, plan_memory
from services.cli.checks.finding import Finding
from services.cli.checks.models import CheckpointFacts
from shared.config import EngineSettings, MemorySettings, SchedulingSettings, Settings, SpeculationSettings
from shared.errors import ConfigError

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LEAST_KV = {"auto": 2, "bfloat16": 2, "float32": 4, "int8": 1, "fp8": 1}  # bytes of a number


def check_memory(settings: Settings, checkpoint: CheckpointFacts, *, workers: int) -> Iterator[Finding]:
    """What the workers' model and KV cache take together, against what is free now."""
    spec, memory = checkpoint.spec, settings.memory
    if settings.scheduling.max_model_len > spec.longest_model_len:
        yield Finding(
            "wrong",
            "memory",
            f"max_model_len is {settings.scheduling.max_model_len}, "
            f"more than the model's {spec.longest_model_len} positions",
        )
        return
    if on_gpu(settings.engine):
        return
    per_token = 2 * spec.num_layers * spec.heads.num_kv_heads * spec.heads.head_dim * LEAST_KV[memory.kv_cache_dtype]
    block_bytes = per_token * memory.block_size
    kv_bytes = memory.num_blocks * block_bytes or memory.kv_cache_memory
    free = available_memory()
    if kv_bytes:
        yield from _check_least(memory, settings.scheduling, checkpoint, block_bytes)
    needed = workers * (kv_bytes + least_weights(settings.engine, checkpoint))
    if needed > free:
        each = f"{workers} workers need" if workers > 1 else "the worker needs"
        yield Finding(
            "wrong",
            "memory",
            f"{each} at least {needed / GIB:.1f} GiB, {workers * kv_bytes / GIB:.1f} of them KV cache, but "
            f"{free / GIB:.1f} GiB are free; {_remedy(memory)}",
        )


def check_draft_memory(engine: EngineSettings, speculation: SpeculationSettings) -> Iterator[Finding]:
    """The KV cache of a draft's model."""
    free = available_memory()
    if not on_gpu(engine) and speculation.draft_kv_cache_memory > free:
        yield Finding(
            "wrong",
            "draft",
            f"draft_kv_cache_memory is {speculation.draft_kv_cache_memory / GIB:.1f} GiB, "
            f"but {free / GIB:.1f} GiB are free",
        )


def _check_least(
    memory: MemorySettings, scheduling: SchedulingSettings, checkpoint: CheckpointFacts, block_bytes: int
) -> Iterator[Finding]:
    """Whether one sequence fits."""
    longest = scheduling.max_model_len or checkpoint.spec.max_position_embeddings
    try:
        plan_memory(
            memory, scheduling, bytes_per_block=block_bytes, budget=memory.kv_cache_memory, max_model_len=longest
        )
    except ConfigError as error:
        yield Finding("wrong", "memory", str(error))


def _remedy(settings: MemorySettings) -> str:
    if settings.num_blocks:
        return "lower num_blocks"
    return "lower kv_cache_memory" if settings.kv_cache_memory else "use a smaller model, or quantization=int8"


def least_weights(settings: EngineSettings, checkpoint: CheckpointFacts) -> int:
    """Bytes of the weights in the smallest format that these settings leave."""
    if checkpoint.tensors is None:
        return 0
    size = 1 if settings.quantization == "int8" else 2
    return min(checkpoint.tensors.num_bytes, size * checkpoint.tensors.num_elements)


def on_gpu(settings: EngineSettings) -> bool:
    """Whether the model may run on a GPU, as far as can be seen without its driver."""
    return settings.device == "cuda" or (settings.device == "auto" and any(Path(p).exists() for p in GPU_DEVICES))
