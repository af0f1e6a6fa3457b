"""What adapters add to a linear, each row by its own: y += B (scales * A x), as LoRA has it.

Projections that are joined in one linear have their A below each other; each has its own ranks and output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to one of the projections that a linear joins."""

    out_features: int
    down: Tensor | None = None  # A [rank, in_features]; None: it adds nothing
    up: Tensor | None = None  # B [out_features, rank]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]  # len() of a tensor takes longer


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Of all adapters that are held, in one linear.  Ranks that an adapter does not use are zeros."""

    down: Tensor  # [num_adapters, num_parts * max_rank, in_features]
    up: Tensor  # [num_adapters, out_features, max_rank]
    scales: Tensor  # [num_adapters, num_parts * max_rank] float32
    parts: tuple[int, ...]  # output features of each of the joined projections

    @classmethod
    def empty(
        cls,
        parts: Sequence[int],
        in_features: int,
        num_adapters: int,
        max_rank: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LoraWeights:
        ranks = len(parts) * max_rank
        return cls(
            torch.zeros(num_adapters, ranks, in_features, dtype=dtype, device=device),
            torch.zeros(num_adapters, sum(parts), max_rank, dtype=dtype, device=device),
            torch.zeros(num_adapters, ranks, device=device),
            tuple(parts),
        )

    @property
    def max_rank(self) -> int:
        return self.up.shape[2]

    @property
    def slices(self) -> list[tuple[slice, slice]]:
        """Of each part, its output features and its ranks."""
        found, start = [], 0
        for index, size in enumerate(self.parts):
            ranks = slice(index * self.max_rank, (index + 1) * self.max_rank)
            found.append((slice(start, start + size), ranks))
            start += size
        return found


def stack(weights: LoraWeights, adapter: int, parts: Sequence[LoraPart]) -> None:
    """Put an adapter in its place; what stood there is gone."""
    for tensor in (weights.down, weights.up, weights.scales):
        tensor[adapter] = 0
    for part, (columns, ranks) in zip(parts, weights.slices, strict=True):
        if part.down is not None and part.up is not None:
            own = slice(ranks.start, ranks.start + part.rank)
            weights.down[adapter, own] = part.down.to(weights.down)
            weights.up[adapter, columns, : part.rank] = part.up.to(weights.up)
            weights.scales[adapter, own] = part.scale


def lora(
    x: Tensor,  # [num_tokens, in_features]
    y: Tensor,  # [num_tokens, out_features], added to
    weights: LoraWeights,
    adapters: Tensor,  # [num_tokens] int64, or NO_ADAPTER
) -> Tensor:  # y
    """In float64 and rounded once, so that a row does not depend on how many others have its adapter."""
    for adapter in torch.unique(adapters).tolist():
        if adapter == NO_ADAPTER:
            continue
        rows = (adapters == adapter).nonzero().flatten()
        reduced = x[rows].double() @ weights.down[adapter].double().t() * weights.scales[adapter]
        added = [reduced[:, ranks] @ weights.up[adapter, columns].double().t() for columns, ranks in weights.slices]
        y[rows] += torch.cat(added, dim=1).to(y.dtype)
    return y
