"""Bad words: a token is forbidden where the history ends in all of a word but this token, its last."""

from __future__ import annotations

import torch
from torch import Tensor

PAIR_FIELDS = 5  # row of the logits, row of the histories, tokens of that history, first token of the word, its tokens


def forbid_words(
    logits: Tensor,  # [n, vocab_size] float32, changed in place
    tokens: Tensor,  # [num_rows, longest] int64: histories
    words: Tensor,  # [num_tokens] int32: of all words, one after the other, none without a token
    pairs: Tensor,  # [num_pairs, PAIR_FIELDS] int32: which word concerns which row
) -> None:
    for place, row, length, start, count in pairs.tolist():
        *before, last = words[start : start + count].tolist()
        if length >= len(before) and tokens[row, length - len(before) : length].tolist() == before:
            logits[place, last] = -torch.inf
