"""How much KV cache fits, and the longest sequence that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.description.spec import ModelSpec
from shared.config import MemorySettings, SchedulingSettings
from shared.errors import ConfigError

GIB = 1 << 30
CPU_MOST = GIB
MOST_BLOCKS = 1 << 21  # where they take no memory
CPU_SHARE = 0.4  # of the memory that is available
PER_ROW = 2  # states: its own, and what is kept of it while drafts are verified
MOST_SNAPSHOTS = 8  # for each row


class WindowBytes(NamedTuple):
    """Of a block in all layers that see a window of the latest tokens."""

    window: int  # tokens
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Blocks that the layers with one window share."""

    window: int  # tokens
    num_blocks: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """Rows, and snapshots of their states."""

    num_rows: int
    num_snapshots: int = 0
    bytes_per_state: int = 0  # of one sequence in all layers; 0: the model keeps none

    @property
    def num_states(self) -> int:
        return PER_ROW * self.num_rows + self.num_snapshots

    @property
    def num_bytes(self) -> int:
        return self.num_states * self.bytes_per_state


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # without the layers of `sliding`
    max_model_len: int  # tokens
    sliding: tuple[WindowPlan, ...] = ()
    states: StatesPlan = StatesPlan(0)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Of all pools and states."""
        windows = sum(one.num_blocks * one.bytes_per_block for one in self.sliding)
        return self.num_blocks * self.bytes_per_block + windows + self.states.num_bytes

    @property
    def windows(self) -> list[tuple[int, int]]:
        """With the numbers of blocks of their pools."""
        return [(one.window, one.num_blocks) for one in self.sliding]

    def __str__(self) -> str:
        windows = "".join(f", {one.num_blocks} for windows of {one.window}" for one in self.sliding)
        states = f"states of {self.states.num_rows} rows and {self.states.num_snapshots} snapshots, "
        return (
            f"KV cache of {self.num_bytes / GIB:.2f} GiB: {self.num_blocks} blocks of {self.block_size} tokens"
            f"{windows}, {states if self.states.bytes_per_state else ''}{self.num_tokens} tokens in all, "
            f"{self.num_tokens / self.max_model_len:.1f} sequences of max_model_len={self.max_model_len}"
        )


def block_bytes(
    spec: ModelSpec, layer_bytes: Sequence[int], windows: Sequence[int]
) -> tuple[int, tuple[WindowBytes, ...]]:
    """Of a block in all layers without one of these windows, and in those of each; `layer_bytes`: in each
    that has a cache."""
    totals = dict.fromkeys((0, *windows), 0)
    for one, size in zip(spec.attentions, layer_bytes, strict=True):
        totals[one.window if one.window in windows else 0] += size
    return totals[0], tuple(WindowBytes(window, totals[window]) for window in windows)


def plan_memory(
    memory: MemorySettings,
    scheduling: SchedulingSettings,
    *,
    bytes_per_block: int,
    budget: int,
    max_model_len: int,
    sliding: Sequence[WindowBytes] = (),
    bytes_per_state: int = 0,
) -> MemoryPlan:
    """Blocks for `budget` bytes, or those that are asked for by number.  `sliding`: layers that share other blocks than
    those of `bytes_per_block`; `bytes_per_state`: of a sequence in the layers that keep a state.

    `max_model_len` shrinks to what fits where the settings leave it open.  Raises ConfigError where it does not fit.
    """
    states = plan_states(memory, scheduling, bytes_per_state=bytes_per_state, budget=budget)
    budget = max(0, budget - states.num_bytes)
    num_blocks, windows = _divide(memory, scheduling, bytes_per_block, budget, max_model_len, sliding)
    capacity = num_blocks * memory.block_size
    if capacity < max_model_len and scheduling.max_model_len == 0:
        max_model_len = capacity
    if capacity < max_model_len or max_model_len < 2:
        needed = -(-max(max_model_len, 2) // memory.block_size)
        size = needed * bytes_per_block + sum(one.num_blocks * one.bytes_per_block for one in windows)
        size += states.num_bytes
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks, but one sequence of {max(max_model_len, 2)} tokens needs {needed} "
            f"({size / GIB:.3f} GiB); lower max_model_len, or raise num_blocks, kv_cache_memory or "
            f"gpu_memory_utilization"
        )
    return MemoryPlan(num_blocks, memory.block_size, bytes_per_block, max_model_len, windows, states)


def plan_states(
    memory: MemorySettings, scheduling: SchedulingSettings, *, bytes_per_state: int, budget: int
) -> StatesPlan:
    """At most half of the budget is for states: for as many rows as max_num_seqs if each can have a snapshot beside its
    own, and for more snapshots then.  Where blocks are asked for by number, all rows have that, whatever it takes.

    Raises ConfigError where there is no room for one row.
    """
    most = scheduling.max_num_seqs
    if bytes_per_state == 0:
        return StatesPlan(most)
    if memory.num_blocks:
        return StatesPlan(most, most, bytes_per_state)
    room = budget // 2 // bytes_per_state
    if room <= PER_ROW:
        raise ConfigError(
            f"this model keeps a state of {bytes_per_state / GIB:.3f} GiB for each sequence, and one that runs alone "
            f"needs {PER_ROW + 1} of them in half of the KV cache's {budget / GIB:.2f} GiB; raise kv_cache_memory or "
            f"gpu_memory_utilization"
        )
    num_rows = min(most, room // (PER_ROW + 1))
    return StatesPlan(num_rows, min(room - PER_ROW * num_rows, MOST_SNAPSHOTS * num_rows), bytes_per_state)


def _divide(
    memory: MemorySettings,
    scheduling: SchedulingSettings,
    bytes_per_block: int,
    budget: int,
    max_model_len: int,
    sliding: Sequence[WindowBytes],
) -> tuple[int, tuple[WindowPlan, ...]]:
    """Blocks of the first pool, and of those of windows.

    With one pool for all layers each layer would have `equal` blocks.  Layers with a window get half as many, so that
    short sequences, which fill no window, never have less than half of that room; and no more than max_num_seqs
    sequences hold of their windows, with what two steps write.  What they leave goes to the first pool, where a
    sequence holds all its tokens.  Where all layers have windows, the first pool has no bytes, and blocks enough.
    """
    size, longest = memory.block_size, -(-max_model_len // memory.block_size)
    equal = memory.num_blocks or budget // (bytes_per_block + sum(one.bytes_per_block for one in sliding))
    share = equal // 2 if bytes_per_block and not memory.num_blocks else equal
    windows = []
    for one in sliding:
        of_window, of_steps = -(-one.window // size), 2 * -(-scheduling.max_num_batched_tokens // size)
        most, least = scheduling.max_num_seqs * (of_window + 2) + of_steps, min(longest, of_window + 2)
        windows.append(WindowPlan(one.window, max(least, min(share, most)), one.bytes_per_block))
    rest = budget - sum(one.num_blocks * one.bytes_per_block for one in windows)
    if memory.num_blocks:
        first = memory.num_blocks
    elif bytes_per_block:
        first = max(0, rest) // bytes_per_block
    else:
        first = min(MOST_BLOCKS, scheduling.max_num_seqs * longest) if rest >= 0 else 0
    return first, tuple(windows)


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
