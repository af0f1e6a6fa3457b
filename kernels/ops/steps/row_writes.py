"""Staged writes: what a plan changes in the tables of the rows, brought to the device in one piece and spread there."""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(
    table: Tensor,  # [num_rows, width], written
    rows: Tensor,  # [n] int32
    begins: Tensor,  # [n] int32: the first column of each write
    starts: Tensor,  # [n + 1] int32: where each one's values begin; the last: their number
    values: Tensor,  # [num_values] int32; no place is written twice
) -> None:
    place = torch.arange(len(values), device=table.device)
    write = torch.searchsorted(starts[1:].long(), place, right=True)
    table[rows.long()[write], begins.long()[write] + place - starts.long()[write]] = values.to(table.dtype)
