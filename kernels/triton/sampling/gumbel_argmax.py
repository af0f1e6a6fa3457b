"""The reference's token with exact noise for the few tokens of a stretch that can have its best score.

Noise in float32, from the same bits, says which those are: all within twice its error of the best.  They are scored in
float64 one by one, as the reference scores all; there are seldom more than one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps
from kernels.triton.sampling.argmax import best_of_rows
from kernels.triton.sampling.noise import ERROR, gumbel, near_gumbel, token_bits

STRETCH = 2048  # tokens of a program


def gumbel_argmax(
    values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [num_rows] float32
    last_tied: Tensor,  # [num_rows] int64
    keys: tuple[Tensor, Tensor],  # each [num_rows] int64, from `kernels.ops.sampling.noise.row_keys`
) -> Tensor:  # [num_rows] int64
    num_rows, vocab_size = values.shape
    num_stretches = triton.cdiv(vocab_size, STRETCH)
    best = torch.empty(num_rows, num_stretches, dtype=torch.float64, device=values.device)
    ids = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=values.device)
    draw_stretches[(num_rows, num_stretches)](
        values, cut, last_tied, *keys, best, ids, vocab_size, values.stride(0),
        BLOCK=STRETCH, num_warps=num_warps(STRETCH),
    )  # fmt: skip
    return best_of_rows(best, ids)


@triton.jit
def draw_stretches(
    values: tl.tensor,  # [num_rows, vocab_size] float32
    cuts: tl.tensor,  # [num_rows] float32
    lasts: tl.tensor,  # [num_rows] int64
    firsts: tl.tensor,  # [num_rows] int64
    seconds: tl.tensor,  # [num_rows] int64
    best: tl.tensor,  # [num_rows, num_stretches] float64
    ids: tl.tensor,  # [num_rows, num_stretches] int32
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, second = tl.load(firsts + row).to(tl.uint32), tl.load(seconds + row).to(tl.uint32)
    cut, last = tl.load(cuts + row), tl.load(lasts + row)
    token_ids = stretch * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    value = tl.load(values + row * stride + token_ids, mask=inside, other=float("-inf"))
    left = inside & (value > float("-inf")) & ((value > cut) | ((value == cut) & (token_ids <= last)))
    value = tl.where(left, value, float("-inf"))
    peak = tl.max(value, 0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    below = tl.where(left, value, peak) - peak
    scores = tl.where(left, below + near_gumbel(token_bits(first, second, token_ids)), float("-inf"))
    top = tl.max(scores, 0)
    bound = top - 2 * ERROR

    best_score = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0x7FFFFFFF, tl.int32)
    while (top >= bound) & (top > float("-inf")):
        token = tl.min(tl.where(scores == top, token_ids, 0x7FFFFFFF), 0)
        exact = tl.load(values + row * stride + token).to(tl.float64) + gumbel(token_bits(first, second, token))
        better = (exact > best_score) | ((exact == best_score) & (token < best_id))
        best_score = tl.where(better, exact, best_score)
        best_id = tl.where(better, token, best_id)
        scores = tl.where(token_ids == token, float("-inf"), scores)
        top = tl.max(scores, 0)
    place = row * tl.num_programs(1) + stretch
    tl.store(best + place, best_score)
    tl.store(ids + place, best_id)
