"""Inputs of linear attention: several sequences in one step, some of them with a state from before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.states.delta_rule import delta_gates
from kernels.ops.states.state_plan import StatePlan


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_plan(slots: Sequence[int], counts: Sequence[int], computed: Sequence[int], device: str = "cpu") -> StatePlan:
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    columns = (torch.tensor(column, dtype=torch.int64, device=device) for column in (slots, starts, computed))
    return StatePlan(*columns)


@dataclass(frozen=True)
class Heads:
    """A layer's dimensions."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaInputs:
    """Tokens of a step, and states that are left of earlier ones."""

    query: Tensor  # [num_tokens, key_heads, key_dim]
    key: Tensor  # [num_tokens, key_heads, key_dim]
    value: Tensor  # [num_tokens, value_heads, value_dim]
    decay: Tensor  # [num_tokens, value_heads]
    beta: Tensor  # [num_tokens, value_heads]

    @classmethod
    def random(cls, heads: Heads, count: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> DeltaInputs:
        """Decays from none at all to nearly everything, by head."""
        rate = torch.logspace(-3, 1.2, heads.value_heads)
        decay, beta = delta_gates(normal(count, 2 * heads.value_heads, seed=seed + 3), rate, normal(len(rate), seed=9))
        query, key = (normal(count, heads.key_heads, heads.key_dim, seed=seed + one, dtype=dtype) for one in (0, 1))
        return cls(
            query, key, normal(count, heads.value_heads, heads.value_dim, seed=seed + 2, dtype=dtype), decay, beta
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value, self.decay, self.beta

    def part(self, tokens: slice) -> DeltaInputs:
        return DeltaInputs(*(tensor[tokens] for tensor in self.tensors))

    def before(self, others: DeltaInputs) -> DeltaInputs:
        """These tokens, and behind them the others."""
        both = zip(self.tensors, others.tensors, strict=True)
        return DeltaInputs(*(torch.cat(pair) for pair in both))

    def to(self, device: torch.device) -> DeltaInputs:
        return DeltaInputs(*(tensor.to(device) for tensor in self.tensors))
