"""The native kernels' short convolution and gated delta rule, and the layout of their states."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.contents import check
from kernels.cpu.binding.sampling import Sampling

PANEL = 16  # columns of a state that lie together


def to_panels(
    states: Tensor,  # [..., key_dim, value_dim], as `kernels.ops.states.delta_rule` has them
) -> Tensor:  # [..., value_dim / 16, key_dim, 16]
    return states.view(*states.shape[:-1], -1, PANEL).transpose(-3, -2).contiguous()


def from_panels(
    panels: Tensor,  # [..., value_dim / 16, key_dim, 16]
) -> Tensor:  # [..., key_dim, value_dim]
    return panels.transpose(-3, -2).flatten(-2)


class LinearAttention(Sampling):
    """The two ops alone, for tests and study: the same code that a step runs.  Both change states in their slots."""

    def causal_conv(
        self,
        delta: abi.PgDelta,  # with `taps` and `inputs`
        step: abi.PgStep,
        x: Tensor,  # [num_tokens, num_channels] float32
    ) -> Tensor:  # [num_tokens, num_channels]
        check(x, torch.float32, (len(x), _num_channels(delta)))
        out = x.clone()
        self._call(self._functions.pg_causal_conv, byref(delta), byref(step), out.data_ptr())
        return out

    def delta_rule(
        self,
        delta: abi.PgDelta,  # with `rate`, `bias` and `states`
        step: abi.PgStep,
        mixed: Tensor,  # [num_tokens, num_channels] float32: queries, keys and values
        gates: Tensor,  # [num_tokens, 2 * value_heads] float32: what becomes beta, then what becomes the decay
    ) -> Tensor:  # [num_tokens, value_heads * value_dim]
        check(mixed, torch.float32, (len(mixed), _num_channels(delta)))
        check(gates, torch.float32, (len(mixed), 2 * delta.value_heads))
        changed, used = mixed.clone(), gates.clone()
        self._call(self._functions.pg_delta_rule, byref(delta), byref(step), changed.data_ptr(), used.data_ptr())
        return changed[:, -delta.value_heads * delta.value_dim :]


def _num_channels(delta: abi.PgDelta) -> int:
    return int(2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim)
