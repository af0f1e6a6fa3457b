"""Log-probabilities of the raw logits, before any constraint, penalty or temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shared.modeling.sampling_columns import Ints


class PositionLogprobs(NamedTuple):
    """One position: the token itself first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # tokens at least as likely as the token itself, which counts


def gather_logprobs(
    logits: Tensor,  # [n, vocab_size] float32
    token_ids: Tensor,  # [n] int64
    counts: Ints,  # [n] most likely tokens asked for; -1: all
) -> list[PositionLogprobs]:
    vocab_size = logits.shape[1]
    wanted = [vocab_size if count < 0 else min(int(count), vocab_size) for count in counts]
    logprobs = logits.double() - logits.double().logsumexp(dim=1, keepdim=True)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs >= own).sum(1).tolist()
    values, ids = _most_likely(logprobs, max(wanted, default=0))
    columns = zip(token_ids.tolist(), own[:, 0].tolist(), ids.tolist(), values.tolist(), ranks, wanted, strict=True)
    return [
        PositionLogprobs([token, *likely[:count]], [logprob, *likely_logprobs[:count]], rank)
        for token, logprob, likely, likely_logprobs, rank, count in columns
    ]


def _most_likely(
    logprobs: Tensor,  # [n, vocab_size] float64
    count: int,
) -> tuple[Tensor, Tensor]:  # values and ids, each [n, count], lower ids first among equals where all are asked for
    if count == logprobs.shape[1]:
        return torch.sort(logprobs, dim=1, descending=True, stable=True)
    values, ids = torch.topk(logprobs, count, dim=1)
    return values, ids
