"""Devices and models as figures, and how long a step takes by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from services.scheduler.state.step import Step
from shared.errors import ConfigError
from shared.metrics import ModelWork
from shared.metrics.steps import StepWork, work_of_columns

GB = 10**9
TB = 10**12


class Device(msgspec.Struct, frozen=True):
    """Rates as its maker states them (dense bfloat16), and the shares of them that a whole model reaches.

    The shares are assumptions, to be replaced by a fit wherever there is a recorded run: well-kept GPU engines read
    weights and keys at about four fifths of the stated bandwidth and prefill at about three fifths of the stated rate.
    """

    name: str
    memory: float  # bytes
    memory_bandwidth: float  # bytes per second
    matrix_rate: float  # floating point operations per second
    bandwidth_share: float = 0.8
    matrix_share: float = 0.6
    step_overhead: float = 1e-3  # seconds: launches, sampling, copies
    row_overhead: float = 5e-6  # seconds per sequence in a step


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 80 * GB, 2.039 * TB, 312 * TB),
        Device("h100", 80 * GB, 3.35 * TB, 989 * TB),
        Device("h200", 141 * GB, 4.8 * TB, 989 * TB),
        Device("b200", 180 * GB, 8 * TB, 2250 * TB),
        Device("l4", 24 * GB, 0.3 * TB, 121 * TB),
        Device("l40s", 48 * GB, 0.864 * TB, 362 * TB),
        Device("mi300x", 192 * GB, 5.3 * TB, 1307 * TB),
    )
}


class DecoderShape(msgspec.Struct, frozen=True):
    """A decoder-only transformer with gated feed-forward layers, under the names of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def work(self) -> ModelWork:
        """What its tokens cost, weights and cached values being of 2 bytes."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * queries + 2 * keys + 3 * self.intermediate_size)
        return ModelWork(
            num_matrix_params=self.num_hidden_layers * layer,
            num_head_params=self.hidden_size * self.vocab_size,
            num_query_features=self.num_hidden_layers * queries,
            kv_bytes_per_token=2 * 2 * self.num_hidden_layers * keys,
        )


SHAPES: Mapping[str, DecoderShape] = {
    "llama-3-8b": DecoderShape(4096, 14336, 32, 32, 8, 128, 128_256),
    "llama-3-70b": DecoderShape(8192, 28672, 80, 64, 8, 128, 128_256),
    "qwen3-32b": DecoderShape(5120, 25600, 64, 64, 8, 128, 151_936),
}


def shape_of(name: str) -> DecoderShape:
    """A shape by its name here, or by a directory with a config.json.  Raises ConfigError."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        derived = {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        }
        return msgspec.convert(config | derived, DecoderShape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} is neither one of {', '.join(SHAPES)} nor a model's directory: {error}") from error


def num_blocks(device: Device, work: ModelWork, block_size: int, utilization: float) -> int:
    """Blocks that fit beside the weights and what a large step needs (a twentieth of the rest).  Raises ConfigError."""
    left = device.memory * utilization - work.weight_bytes
    found = int(0.95 * left / (work.kv_bytes_per_token * block_size))
    if found < 1:
        raise ConfigError(f"{work.weight_bytes / GB:.1f} GB of weights leave no room for a KV cache on {device.name}")
    return found


def work_of(step: Step) -> StepWork:
    """The work of a step that has been planned."""
    return work_of_columns(step.num_computed, step.num_scheduled, sum(step.num_samples))


class StepTime(Protocol):
    def seconds(self, work: StepWork, start: float, worker: int) -> float:
        """Of a step that a worker begins at this time of the run, in seconds."""


class Roofline:
    """Linear layers and attention are each bound by arithmetic or by memory, whichever takes longer.

    Source of the idea: Williams, Waterman, Patterson, "Roofline" (2009).
    """

    def __init__(self, device: Device, model: ModelWork) -> None:
        rate = device.matrix_rate * device.matrix_share
        bandwidth = device.memory_bandwidth * device.bandwidth_share
        self._fixed = device.step_overhead
        self._per_row = device.row_overhead
        self._weights = model.weight_bytes / bandwidth
        self._per_token = 2 * model.num_matrix_params / rate
        self._per_sample = 2 * model.num_head_params / rate
        self._per_pair = 4 * model.num_query_features / rate
        self._per_context = model.kv_bytes_per_token / bandwidth

    def seconds(self, work: StepWork, start: float = 0.0, worker: int = 0) -> float:
        linear = work.num_tokens * self._per_token + work.num_samples * self._per_sample
        attention = max(work.num_pairs * self._per_pair, work.num_context * self._per_context)
        return self._fixed + self._per_row * work.num_sequences + max(linear, self._weights) + attention
