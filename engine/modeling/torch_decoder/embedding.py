"""Where a decoder's rows of token ids come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.linears.linear import LinearWeight
from kernels.ops.linears.linear_int8 import read_rows

Embed = Callable[[Tensor], Tensor]  # token ids [n] int64 -> [n, hidden_size]


@dataclass(frozen=True, slots=True)
class StoredRows:
    weight: Tensor  # [vocab_size, hidden_size]

    def __call__(
        self,
        token_ids: Tensor,  # [n] int64
    ) -> Tensor:  # [n, hidden_size]
        return torch.nn.functional.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Of a quantised head, which is the embedding too."""

    head: LinearWeight  # [vocab_size, hidden_size] int8
    dtype: torch.dtype

    def __call__(
        self,
        token_ids: Tensor,  # [n] int64
    ) -> Tensor:  # [n, hidden_size]
        return read_rows(self.head, token_ids).to(self.dtype)
