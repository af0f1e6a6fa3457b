"""Penalties by two launches: one counts the tokens of the histories, the other goes over the logits of these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps

STRETCH = 2048  # tokens of a program
IN_PROMPT = tl.constexpr(1 << 30)  # marks a token of the prompt; below it occurrences in the output are counted


def penalise(
    logits: Tensor,  # [n, vocab_size] float32, changed in place
    tokens: Tensor,  # [num_rows, longest] int64: histories
    rows: Tensor,  # [n] int64
    lengths: Tensor,  # [n] int64: of each history
    num_prompt: Tensor,  # [n] int64: how much of it is the prompt
    factors: tuple[Tensor, Tensor, Tensor],  # repetition, frequency, presence: each [n] float32
) -> None:
    num_rows, vocab_size = logits.shape
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    count_tokens[(num_rows, triton.cdiv(tokens.shape[1], STRETCH))](
        tokens, rows, lengths, num_prompt, counts, vocab_size, tokens.stride(0),
        BLOCK=STRETCH, num_warps=num_warps(STRETCH),
    )  # fmt: skip
    penalise_counted[(num_rows, triton.cdiv(vocab_size, STRETCH))](
        logits, counts, *factors, vocab_size, logits.stride(0), BLOCK=STRETCH, num_warps=num_warps(STRETCH)
    )


@triton.jit
def count_tokens(
    tokens: tl.tensor,  # [num_rows, longest] int64
    rows: tl.tensor,  # [n] int64
    lengths: tl.tensor,  # [n] int64
    num_prompt: tl.tensor,  # [n] int64
    counts: tl.tensor,  # [n, vocab_size] int32, zero
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    one = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tl.load(lengths + one)
    token = tl.load(tokens + tl.load(rows + one) * stride + places, mask=inside, other=0)
    prompt = places < tl.load(num_prompt + one)
    place = counts + one * vocab_size + token
    tl.atomic_add(place, tl.full((BLOCK,), 1, tl.int32), mask=inside & (places >= tl.load(num_prompt + one)))
    tl.atomic_or(place, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=inside & prompt)


@triton.jit
def penalise_counted(
    logits: tl.tensor,  # [n, vocab_size] float32
    counts: tl.tensor,  # [n, vocab_size] int32
    repetitions: tl.tensor,  # [n] float32
    frequencies: tl.tensor,  # [n] float32
    presences: tl.tensor,  # [n] float32
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    count = tl.load(counts + row * vocab_size + token_ids, mask=inside, other=0)
    seen = inside & (count > 0)
    value = tl.load(logits + row * stride + token_ids, mask=seen, other=0.0)
    repetition = tl.load(repetitions + row)
    value = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
    number = (count & (IN_PROMPT - 1)).to(tl.float32)
    often = tl.load(frequencies + row) * number + tl.load(presences + row) * (number > 0.0).to(tl.float32)
    tl.store(logits + row * stride + token_ids, value - often, mask=seen)
