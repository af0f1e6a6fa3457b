"""How much KV cache fits, and the longest sequence that it allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.config import MemorySettings, SchedulingSettings
from shared.errors import ConfigError

GIB = 1 << 30
CPU_MOST = GIB
CPU_SHARE = 0.4  # of the memory that is available


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int
    max_model_len: int  # tokens

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        return (
            f"KV cache of {self.num_blocks * self.bytes_per_block / GIB:.2f} GiB: {self.num_blocks} blocks of "
            f"{self.block_size} tokens, {self.num_tokens} tokens in all, "
            f"{self.num_tokens / self.max_model_len:.1f} sequences of max_model_len={self.max_model_len}"
        )


def plan_memory(
    memory: MemorySettings, scheduling: SchedulingSettings, *, bytes_per_block: int, budget: int, max_model_len: int
) -> MemoryPlan:
    """Blocks for `budget` bytes, or those that are asked for by number.

    `max_model_len` shrinks to what fits where the settings leave it open.  Raises ConfigError where it does not fit.
    """
    num_blocks = memory.num_blocks or budget // bytes_per_block
    capacity = num_blocks * memory.block_size
    if capacity < max_model_len and scheduling.max_model_len == 0:
        max_model_len = capacity
    if capacity < max_model_len or max_model_len < 2:
        needed = -(-max(max_model_len, 2) // memory.block_size)
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks, but one sequence of {max(max_model_len, 2)} tokens needs {needed} "
            f"({needed * bytes_per_block / GIB:.3f} GiB); lower max_model_len, or raise num_blocks, kv_cache_memory or "
            f"gpu_memory_utilization"
        )
    return MemoryPlan(num_blocks, memory.block_size, bytes_per_block, max_model_len)


def cpu_budget(settings: MemorySettings) -> int:
    """Bytes for the KV cache on a CPU."""
    return settings.kv_cache_memory or min(CPU_MOST, int(available_memory() * CPU_SHARE))


def gpu_budget(settings: MemorySettings, *, total: int, weights: int, peak_activation: int) -> int:
    """Bytes for the KV cache on a GPU: this instance's share, less what weights and one full step take."""
    return settings.kv_cache_memory or int(total * settings.gpu_memory_utilization) - weights - peak_activation


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's where that is less."""
    machine = _meminfo_available()
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return machine
    return min(machine, max(0, limit - used))


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 2 * CPU_MOST
    kibibytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 2 * CPU_MOST >> 10)
    return kibibytes << 10


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
