"""The same token as the reference, with exact noise for the few tokens that can still win.

Noise is bounded, so a token further below the most likely one than MAX_NOISE less that one's noise is out at once.
Where many are left, an approximate noise in float32, from the same hash in wrapping int32, finds the few whose exact
score could be the best: its error is below ERROR for each of the 2**24 uniforms (a test goes through them all).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.sampling.noise import MAX_NOISE, TOKEN_STEP, UNIT, gumbel_noise

MANY = 512  # candidates of a row from which the approximate pass is worth its while
BLOCK = 1 << 16  # int32 scores of the approximate pass: stay in the second-level cache
MARGIN = 1e-2  # covers the rounding of thresholds to float32
ERROR = 0.1  # of the approximate noise


def gumbel_argmax(
    values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [num_rows] float32
    last_tied: Tensor,  # [num_rows] int64
    keys: tuple[Tensor, Tensor],  # each [num_rows] int64, from `kernels.ops.sampling.noise.row_keys`
) -> Tensor:  # [num_rows] int64
    peak, likeliest = values.max(dim=1)
    reachable = peak.double() + gumbel_noise(*keys, likeliest) - MAX_NOISE
    threshold = torch.maximum(cut, (reachable - MARGIN - reachable.abs() * 1e-6).float())
    possible = values >= threshold[:, None]
    _drop_ties(possible, values, cut, last_tied)
    crowded = (possible.sum(1) > MANY).nonzero()[:, 0]
    if len(crowded):
        below = (values[crowded] - peak[crowded, None]).masked_fill_(~possible[crowded], float("-inf"))
        possible[crowded] = _near_best(below, [key[crowded] for key in keys])
    rows, token_ids = possible.nonzero(as_tuple=True)
    scores = values[rows, token_ids].double() + gumbel_noise(keys[0][rows], keys[1][rows], token_ids)
    return _winners(scores, rows, token_ids, len(values))


def _drop_ties(
    possible: Tensor,  # [num_rows, vocab_size] bool, changed in place
    values: Tensor,  # [num_rows, vocab_size] float32
    cut: Tensor,  # [num_rows] float32
    last_tied: Tensor,  # [num_rows] int64
) -> None:
    bounded = (last_tied < values.shape[1]).nonzero()[:, 0]
    if len(bounded):
        late = torch.arange(values.shape[1]) > last_tied[bounded, None]
        possible[bounded] &= ~(late & (values[bounded] == cut[bounded, None]))


def _winners(
    scores: Tensor,  # [num_candidates] float64
    rows: Tensor,  # [num_candidates] int64
    token_ids: Tensor,  # [num_candidates] int64
    num_rows: int,
) -> Tensor:  # [num_rows] int64: the best of each row, the lowest id among equals
    best = scores.new_full((num_rows,), float("-inf")).scatter_reduce_(0, rows, scores, "amax")
    won = scores == best[rows]
    unset = torch.iinfo(torch.int64).max
    lowest = token_ids.new_full((num_rows,), unset).scatter_reduce_(0, rows[won], token_ids[won], "amin")
    return lowest.masked_fill_(lowest == unset, 0)


def _near_best(
    below: Tensor,  # [n, vocab_size] float32: value - the row's largest, -inf where the token is out
    keys: list[Tensor],  # two, each [n] int64
) -> Tensor:  # [n, vocab_size] bool: those whose exact score can be the best of their row
    steps = (torch.arange(below.shape[1]) * TOKEN_STEP).to(torch.int32)
    first, second = (key.to(torch.int32)[:, None] for key in keys)
    size = max(1, BLOCK // below.shape[1])
    near = torch.empty_like(below, dtype=torch.bool)
    for start in range(0, len(below), size):
        rows = slice(start, start + size)
        bits = _mix(_mix(first[rows] ^ steps).add_(second[rows]))
        scores = approximate_noise(bits).add_(below[rows])
        torch.ge(scores, scores.amax(1, keepdim=True) - (2 * ERROR + MARGIN), out=near[rows])
    return near


def approximate_noise(
    bits: Tensor,  # [...] int32: the hash
) -> Tensor:  # [...] float32
    # 1 - u is exact in float32 where u is near one, which is where the noise is large.
    rest = (bits >> 8).bitwise_and_(0xFFFFFF).neg_().add_(0xFFFFFF).float().add_(0.5).mul_(UNIT)
    return rest.clamp_(max=1 - UNIT).neg_().log1p_().neg_().log_().neg_()


def _mix(
    word: Tensor,  # [...] int32, overwritten
) -> Tensor:  # [...] int32: `kernels.ops.sampling.noise.mix`, whose masks are what int32 does by itself
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    word.bitwise_xor_((word >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
