"""min_p, top_k and top_p as one threshold per row: kept are the values above `cut`, and of those equal to it the ones
with ids up to `last_tied`.

In this order: min_p drops what is less likely than that share of the most likely; top_k what is below the k-th largest
value (its equals stay); top_p keeps of what is left the smallest set of the most likely, lower ids first among equals,
whose mass reaches that share of what is left, and at least one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncation(
    values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    depth: Tensor,  # [num_rows] float64: log(min_p); -inf: off
    top_k: Tensor,  # [num_rows] int64; 0: off
    top_p: Tensor,  # [num_rows] float64; 1: off
) -> tuple[Tensor, Tensor]:  # cut [num_rows] float32, last_tied [num_rows] int64: vocab_size where nothing is dropped
    vocab_size = values.shape[1]
    ordered, ids = values.sort(dim=1, descending=True, stable=True)
    peak = ordered[:, 0].double()
    cut = (peak + depth).float()
    kth = ordered.gather(1, (top_k - 1).clamp(0, vocab_size - 1)[:, None])[:, 0]
    cut = torch.where((top_k > 0) & (top_k < vocab_size), torch.maximum(cut, kth), cut)
    mass = (ordered.double() - peak[:, None]).exp().masked_fill_(ordered < cut[:, None], 0.0)
    missing = (mass.cumsum(1) < top_p[:, None] * mass.sum(1, keepdim=True)).sum(1)
    last = torch.minimum(missing, (ordered >= cut[:, None]).sum(1) - 1).clamp_(min=0)[:, None]
    nucleus = (top_p < 1.0) & (peak > float("-inf"))
    last_tied = torch.where(nucleus, ids.gather(1, last)[:, 0], vocab_size)
    return torch.where(nucleus, ordered.gather(1, last)[:, 0], cut), last_tied
