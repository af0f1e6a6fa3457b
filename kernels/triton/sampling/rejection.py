"""Speculative sampling as `kernels.ops.sampling.rejection` says it: a program per position, its sums along one row
only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.noise import token_bits, uniform

BLOCK = 2048  # tokens looked at together


def accepts(
    values: Tensor,  # [n, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [n] float32
    last_tied: Tensor,  # [n] int64
    draft_ids: Tensor,  # [n] int64
    proposed: Tensor,  # [n] float64: q of the draft tokens
    keys: tuple[Tensor, Tensor],  # each [n] int64, from `kernels.ops.sampling.noise.row_keys`
) -> Tensor:  # [n] bool
    found = torch.empty(len(values), dtype=torch.bool, device=values.device)
    if len(values):
        accept_rows[(len(values),)](
            values, cut, last_tied, draft_ids, proposed, *keys, found, values.shape[1], values.stride(0),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return found


def log_residual(
    values: Tensor,  # [n, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [n] float32
    last_tied: Tensor,  # [n] int64
    owners: Tensor,  # [num_entries] int64: the row of each entry of q; below zero: of none
    token_ids: Tensor,  # [num_entries] int64, distinct within a row
    probs: Tensor,  # [num_entries] float64
) -> Tensor:  # [n, vocab_size] float32: log of max(0, p - q), not normalised; -inf where it is zero
    out = values.new_empty(values.shape)
    totals = torch.empty(len(values), 2, dtype=torch.float64, device=values.device)
    shared = (values.shape[1], values.stride(0))
    if len(values):
        log_target_rows[(len(values),)](values, cut, last_tied, out, totals, *shared, BLOCK=BLOCK, num_warps=8)
    if len(owners):
        subtract_entries[(len(owners),)](
            values, cut, last_tied, owners, token_ids, probs, out, totals, *shared, num_warps=1
        )
    return out


@triton.jit
def kept_values(
    values: tl.tensor,  # one row
    token_ids: tl.tensor,  # [BLOCK] int32
    cut: tl.tensor,
    last: tl.tensor,
    vocab_size: int,
) -> tl.tensor:  # [BLOCK] float32, -inf for what truncation drops
    value = tl.load(values + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
    kept = (value > cut) | ((value == cut) & (token_ids <= last))
    return tl.where(kept, value, float("-inf"))


@triton.jit
def peak_and_total(
    values: tl.tensor,  # one row
    cut: tl.tensor,
    last: tl.tensor,
    vocab_size: int,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # the largest value, and the mass of what is kept over its: float32, float64
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        best = tl.maximum(best, kept_values(values, start + tl.arange(0, BLOCK), cut, last, vocab_size))
    peak = tl.max(best, 0)
    finite = tl.where(peak > float("-inf"), peak, 0.0)
    held = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        kept = kept_values(values, start + tl.arange(0, BLOCK), cut, last, vocab_size)
        held += tl.exp(kept - finite).to(tl.float64)
    return finite, tl.sum(held, 0)


@triton.jit
def accept_rows(
    values: tl.tensor,  # [n, vocab_size] float32
    cuts: tl.tensor,  # [n] float32
    lasts: tl.tensor,  # [n] int64
    draft_ids: tl.tensor,  # [n] int64
    proposed: tl.tensor,  # [n] float64
    firsts: tl.tensor,  # [n] int64
    seconds: tl.tensor,  # [n] int64
    found: tl.tensor,  # [n] bool
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cut, last, source = tl.load(cuts + row), tl.load(lasts + row), values + row * stride
    peak, total = peak_and_total(source, cut, last, vocab_size, BLOCK)
    draft = tl.load(draft_ids + row).to(tl.int32)
    own = tl.exp(kept_values(source, draft, cut, last, vocab_size) - peak).to(tl.float64)
    bits = token_bits(tl.load(firsts + row).to(tl.uint32), tl.load(seconds + row).to(tl.uint32), draft)
    accepted = uniform(bits) * tl.load(proposed + row) * total < own
    tl.store(found + row, accepted & (total > 0.0))


@triton.jit
def log_target_rows(
    values: tl.tensor,  # [n, vocab_size] float32
    cuts: tl.tensor,  # [n] float32
    lasts: tl.tensor,  # [n] int64
    out: tl.tensor,  # [n, vocab_size] float32, contiguous
    totals: tl.tensor,  # [n, 2] float64: the largest value, and the mass over its
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cut, last, source = tl.load(cuts + row), tl.load(lasts + row), values + row * stride
    peak, total = peak_and_total(source, cut, last, vocab_size, BLOCK)
    scale = peak.to(tl.float64) + tl.log(tl.where(total > 0.0, total, 1.0))
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        kept = kept_values(source, token_ids, cut, last, vocab_size)
        tl.store(out + row * vocab_size + token_ids, kept - scale.to(tl.float32), mask=token_ids < vocab_size)
    tl.store(totals + row * 2, peak.to(tl.float64))
    tl.store(totals + row * 2 + 1, total)


@triton.jit
def subtract_entries(
    values: tl.tensor,  # [n, vocab_size] float32
    cuts: tl.tensor,  # [n] float32
    lasts: tl.tensor,  # [n] int64
    owners: tl.tensor,  # [num_entries] int64
    token_ids: tl.tensor,  # [num_entries] int64
    probs: tl.tensor,  # [num_entries] float64
    out: tl.tensor,  # [n, vocab_size] float32, contiguous
    totals: tl.tensor,  # [n, 2] float64
    vocab_size: int,
    stride: int,
) -> None:
    entry = tl.program_id(0)
    row, token = tl.load(owners + entry), tl.load(token_ids + entry)
    owned = row >= 0
    row = tl.maximum(row, 0)
    kept = kept_values(values + row * stride, token.to(tl.int32), tl.load(cuts + row), tl.load(lasts + row), vocab_size)
    peak, total = tl.load(totals + row * 2), tl.load(totals + row * 2 + 1)
    target = tl.exp(kept.to(tl.float64) - peak) / tl.where(total > 0.0, total, 1.0)
    left = target - tl.load(probs + entry)
    log_left = tl.where(left > 0.0, tl.log(tl.where(left > 0.0, left, 1.0)), float("-inf"))
    tl.store(out + row * vocab_size + token, log_left.to(tl.float32), mask=owned)
