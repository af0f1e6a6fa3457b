"""Bad words where the histories are: one program for each word that concerns a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16  # tokens compared at a time; most words are shorter


def forbid_words(
    logits: Tensor,  # [n, vocab_size] float32, changed in place
    tokens: Tensor,  # [num_rows, longest] int64: histories
    words: Tensor,  # [num_tokens] int32: of all words, one after the other, none without a token
    pairs: Tensor,  # [num_pairs, PAIR_FIELDS] int32: as `kernels.ops.sampling.bad_words` says
) -> None:
    if len(pairs):
        forbid_last_tokens[(len(pairs),)](
            logits, tokens, words, pairs, logits.stride(0), tokens.stride(0), pairs.stride(0),
            BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip


@triton.jit
def forbid_last_tokens(
    logits: tl.tensor,  # [n, vocab_size] float32
    tokens: tl.tensor,  # [num_rows, longest] int64
    words: tl.tensor,  # [num_tokens] int32
    pairs: tl.tensor,  # [num_pairs, PAIR_FIELDS] int32
    logits_stride: int,
    token_stride: int,
    pair_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    pair = pairs + tl.program_id(0) * pair_stride
    place, row, length = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64), tl.load(pair + 2)
    word, before = words + tl.load(pair + 3), tl.load(pair + 4) - 1
    tail = tokens + row * token_stride + length - before
    missed = (length < before).to(tl.int32)
    compared = before * (1 - missed)
    for first in range(0, compared, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < compared
        wanted = tl.load(word + offsets, mask=inside, other=-1)
        found = tl.load(tail + offsets, mask=inside, other=-1)
        missed += tl.sum((wanted != found).to(tl.int32), 0)
    last = tl.load(word + before)
    tl.store(logits + place * logits_stride + last, float("-inf"), mask=missed == 0)
