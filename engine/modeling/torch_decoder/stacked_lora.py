"""Adapters as the torch decoder reads them: those of each linear in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.lora.adapter import LoraAdapter
from kernels.ops.linears.lora import LoraPart, LoraWeights, stack


class StackedAdapters:
    """Memory for a linear's adapters is there once one of them changes it.  A place is written only while no step
    names it."""

    def __init__(self, count: int, max_rank: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers: list[dict[str, LoraWeights]] = [{} for _ in range(num_layers)]
        self._ends: dict[str, LoraWeights] = {}
        self._table: Tensor | None = None  # [vocab_size, count, max_rank]: the embedding's A
        self._count = count
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device

    def hold(self, place: int, adapter: LoraAdapter) -> None:
        self.drop(place)
        for weights, slots in zip(self.layers, adapter.layers, strict=True):
            for slot, parts in slots.items():
                self._put(weights, slot, place, parts)
        if adapter.head is not None:
            self._put(self._ends, "head", place, (adapter.head,))
        if adapter.embedding is not None:
            self._hold_embedding(place, adapter.embedding)

    def _put(self, linears: dict[str, LoraWeights], name: str, place: int, parts: Sequence[LoraPart]) -> None:
        if name not in linears:
            sizes = [part.out_features for part in parts]
            depth = next(part.down.shape[1] for part in parts if part.down is not None)
            linears[name] = LoraWeights.empty(sizes, depth, self._count, self._max_rank, self._dtype, self._device)
        stack(linears[name], place, parts)

    def _hold_embedding(self, place: int, part: LoraPart) -> None:
        """Its A is a table; B is stacked like others, behind an A that leaves what the table gives as it is."""
        assert part.down is not None
        if self._table is None:
            shape = part.down.shape[1], self._count, self._max_rank
            self._table = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._table[:, place] = 0
        self._table[:, place, : part.rank] = part.down.t().to(self._table)
        self._put(self._ends, "embedding", place, (replace(part, down=torch.eye(part.rank, self._max_rank)),))

    def head(self) -> LoraWeights | None:
        return self._ends.get("head")

    def embedded(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        adapters: Tensor,  # [num_tokens] int64, or NO_ADAPTER
    ) -> tuple[Tensor, LoraWeights] | None:  # what the linear of these weights reads: [num_tokens, max_rank]
        if self._table is None:
            return None
        return self._table[token_ids, adapters.clamp(min=0)], self._ends["embedding"]

    def drop(self, place: int) -> None:
        for weights in (*self.layers, self._ends):
            for one in weights.values():
                one.scales[place] = 0
