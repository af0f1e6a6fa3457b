"""min_p, top_k and top_p as one threshold per row.

A row keeps the tokens above `cut`, and of those equal to it the ones with ids up to `last_tied`: the boundary of
top_p may fall between equals, and lower ids come first.  All sums are float64 and along one row only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Floats, Ints, SamplingColumns
from kernels.ops.steps.transfer import to_device

FIRST_TOP = 128  # tokens looked at first for the boundary of top_p; most nuclei are smaller
GROWTH = 16
BLOCK = 32  # tokens whose best stands for them all in the search for the largest


@dataclass(frozen=True, slots=True)
class Truncation:
    cut: Tensor  # [num_rows] float32
    last_tied: Tensor  # [num_rows] int64


def truncate(
    scaled: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    peak: Tensor,  # [num_rows] float32: the largest of each row
    columns: SamplingColumns,
    rows: Ints,  # [num_rows]
) -> Truncation:
    vocab_size = scaled.shape[1]
    found = Truncation(torch.full_like(peak, float("-inf")), torch.full_like(peak, vocab_size, dtype=torch.int64))
    min_p, top_k, top_p = columns.min_p[rows], columns.top_k[rows], columns.top_p[rows]
    if min_p.any():
        with np.errstate(divide="ignore"):
            depth = to_device(np.log(min_p), peak.device)  # -inf where off
        found.cut.copy_(peak.double() + depth)
    places = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if len(places):
        _apply_top_k(found, scaled, top_k[places], places)
    narrowed = (min_p > 0) | (top_k > 0)
    for chosen in (narrowed, ~narrowed):
        places = np.flatnonzero(chosen & (top_p < 1.0))
        if len(places):
            _apply_top_p(found, scaled, peak, top_p[places], places)
    return found


def truncate_by(
    kernel: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],  # `kernels.ops.sampling.truncation`
    scaled: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    columns: SamplingColumns,
    rows: Ints,  # [num_rows]
) -> Truncation:
    """The same where the logits are, without waiting for them."""
    with np.errstate(divide="ignore"):
        depth = np.log(columns.min_p[rows])  # -inf where off
    limits = (to_device(column, scaled.device) for column in (depth, columns.top_k[rows], columns.top_p[rows]))
    return Truncation(*kernel(scaled, *limits))


def keep_most_likely(
    found: Truncation,  # changed in place
    scaled: Tensor,  # [num_rows, vocab_size] float32
    count: int,
) -> None:
    """Narrow it to at most `count` tokens a row; of equals at the boundary the lowest ids stay."""
    largest = largest_values(scaled, min(count, scaled.shape[1]))
    least = largest[:, -1:]
    last = _nth_equal(scaled, least, (largest == least).sum(1).clamp_(min=1))
    least = least[:, 0]
    last = torch.where(least == found.cut, torch.minimum(last, found.last_tied), last)
    found.last_tied.copy_(torch.where(least < found.cut, found.last_tied, last))
    found.cut.copy_(torch.maximum(found.cut, least))


def kept_tokens(
    found: Truncation,
    scaled: Tensor,  # [num_rows, vocab_size] float32
) -> tuple[Tensor, Tensor]:  # rows and token ids [num_kept], in this order; none that is masked
    rows, token_ids = (scaled >= found.cut[:, None]).nonzero(as_tuple=True)
    values, cut = scaled[rows, token_ids], found.cut[rows]
    kept = values.isfinite() & ((values > cut) | (token_ids <= found.last_tied[rows]))
    return rows[kept], token_ids[kept]


def _apply_top_k(
    found: Truncation,
    scaled: Tensor,  # [num_rows, vocab_size]
    top_k: Ints,  # [n]
    places: Ints,  # [n]
) -> None:
    """Keep what is not below the k-th largest; all of its equals stay."""
    where = to_device(places, scaled.device)
    largest = largest_values(_select(scaled, where), int(top_k.max()))
    kth = largest.gather(1, to_device(top_k - 1, scaled.device)[:, None])[:, 0]
    found.cut[where] = torch.maximum(found.cut[where], kth)


def _apply_top_p(
    found: Truncation,
    scaled: Tensor,  # [num_rows, vocab_size]
    peak: Tensor,  # [num_rows]
    top_p: Floats,  # [n]
    places: Ints,  # [n]
) -> None:
    """Keep the smallest set of the most likely whose mass, of what is left, reaches p; at least one token."""
    where = to_device(places, scaled.device)
    values, peak, floor = _select(scaled, where), peak[where, None], found.cut[where, None]
    left = values if bool(torch.isneginf(floor).any()) else _pack(values, floor, at_least=1)
    total = _mass(left, peak, floor).sum(1, keepdim=True)
    ordered, reached = _nucleus(left, peak, floor, to_device(top_p, total.device)[:, None] * total)
    cut = ordered.gather(1, reached[:, None])
    kept_ties = reached + 1 - (ordered > cut).sum(1)
    found.cut[where] = cut[:, 0]
    found.last_tied[where] = _nth_equal(values, cut, kept_ties)


def _nucleus(
    values: Tensor,  # [n, vocab_size]
    peak: Tensor,  # [n, 1]
    floor: Tensor,  # [n, 1]
    wanted: Tensor,  # [n, 1] float64 mass
) -> tuple[Tensor, Tensor]:  # the largest values in order [n, some], and the place of the last one kept [n]
    vocab_size, size = values.shape[1], FIRST_TOP
    while True:
        ordered = largest_values(values, min(size, vocab_size))
        missing = _mass(ordered, peak, floor).cumsum(1) < wanted
        if size >= vocab_size or not bool(missing[:, -1].any()):
            # Where rounding leaves the whole just short of p, everything down to the floor is kept.
            kept = (ordered >= floor).sum(1)
            return ordered, torch.minimum(missing.sum(1), kept - 1).clamp_(min=0)
        size *= GROWTH


def largest_values(
    values: Tensor,  # [n, vocab_size]
    count: int,
) -> Tensor:  # [n, count], in order
    """The largest of each row; where few are wanted, only from what is not below the count-th best block's best."""
    num_blocks = values.shape[1] // BLOCK
    if num_blocks < 4 * count:
        return torch.topk(values, count, dim=1).values
    bests = values[:, : num_blocks * BLOCK].reshape(len(values), num_blocks, BLOCK).amax(2)
    bound = torch.topk(bests, count, dim=1).values[:, -1:]
    return torch.topk(_pack(values, bound, at_least=count), count, dim=1).values


def _pack(
    values: Tensor,  # [n, vocab_size]
    bound: Tensor,  # [n, 1]
    *,
    at_least: int,
) -> Tensor:  # [n, most of a row, or at_least]: those not below the bound, in order of token id, then -inf
    rows, token_ids = (values >= bound).nonzero(as_tuple=True)
    starts = torch.searchsorted(rows, torch.arange(len(values), device=rows.device))
    places = torch.arange(len(rows), device=rows.device) - starts[rows]
    width = max(at_least, int(places.max()) + 1 if len(places) else 0)
    packed = values.new_full((len(values), width), float("-inf"))
    packed[rows, places] = values[rows, token_ids]
    return packed


def _mass(
    values: Tensor,  # [n, m]
    peak: Tensor,  # [n, 1]
    floor: Tensor,  # [n, 1]
) -> Tensor:  # [n, m] float64: exp(value - peak), zero below the floor
    return (values.double() - peak).exp_().masked_fill_(values < floor, 0.0)


def _nth_equal(
    values: Tensor,  # [n, vocab_size]
    cut: Tensor,  # [n, 1]
    count: Tensor,  # [n] int64, at least 1
) -> Tensor:  # [n] int64: the id of each row's count-th value that equals the cut
    rows, token_ids = (values == cut).nonzero(as_tuple=True)
    starts = torch.searchsorted(rows, torch.arange(len(values), device=rows.device))
    token_ids = torch.cat((token_ids, token_ids.new_full((1,), values.shape[1])))  # where all are NaN, nothing equals
    return token_ids[(starts + count - 1).clamp_(max=len(token_ids) - 1)]


def _select(
    scaled: Tensor,  # [num_rows, vocab_size]
    where: Tensor,  # [n] int64
) -> Tensor:  # [n, vocab_size]
    return scaled if len(where) == len(scaled) else scaled[where]
