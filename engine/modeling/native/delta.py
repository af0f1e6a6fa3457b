"""A layer's linear attention as the native library reads it: weights, and the states of all rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.spec import DeltaNetSpec
from kernels.cpu.binding import abi
from kernels.cpu.binding.linear_attention import PANEL
from kernels.cpu.binding.packing import PackedLinear


@dataclass(frozen=True, slots=True)
class NativeDelta:
    """All but the gates' linear is float32."""

    described: DeltaNetSpec
    gates: PackedLinear  # [2 * value_heads, hidden_size]
    taps: Tensor  # [conv_width, channels]
    rate: Tensor  # [value_heads]
    step: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]

    def fill(self, struct: abi.PgDelta, inputs: int, states: int) -> None:
        """With the addresses of `make_states`."""
        struct.gates = self.gates.struct
        struct.taps, struct.rate, struct.bias = (one.data_ptr() for one in (self.taps, self.rate, self.step))
        struct.norm = abi.PgNorm(self.norm.data_ptr(), None, abi.RMS_NORM)
        struct.inputs, struct.states = inputs, states


def describe_delta(delta: DeltaNetSpec) -> abi.PgDelta:
    """The dimensions, without any memory."""
    return abi.PgDelta(delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.conv_width)


def make_states(d: DeltaNetSpec, num_rows: int) -> tuple[Tensor, Tensor]:
    """Inputs of the convolution [num_rows, conv_width - 1, channels], and states in panels of columns, float32."""
    return (
        torch.zeros(num_rows, d.conv_width - 1, d.channels),
        torch.zeros(num_rows, d.value_heads, d.value_dim // PANEL, d.key_dim, PANEL),
    )
