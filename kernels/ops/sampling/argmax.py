"""The most likely token of each row, the lowest id among equals."""

from __future__ import annotations

from torch import Tensor


def argmax(
    logits: Tensor,  # [num_rows, vocab_size]
) -> Tensor:  # [num_rows] int64
    return logits.float().argmax(dim=1)
