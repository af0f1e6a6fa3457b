"""Log-probabilities of the raw logits, before any constraint, penalty or temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.columns import Ints
from kernels.ops.steps.transfer import to_device, to_host


class PositionLogprobs(NamedTuple):
    """One position: the token itself first, then the most likely ones in order, or those that were named."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # tokens at least as likely as the token itself, which counts


class Scores(NamedTuple):
    """Of n positions, where their logits are."""

    token_ids: Tensor  # [n] int64
    own: Tensor  # [n] float64
    ranks: Tensor  # [n] int64
    ids: Tensor  # [n, most] int64: the most likely tokens, in order, or those that were named
    values: Tensor  # [n, most] float64

    def to_host(self) -> Scores:
        """On its way there."""
        return Scores(*map(to_host, self))


def score(
    logits: Tensor,  # [n, vocab_size] float32
    token_ids: Tensor,  # [n] int64
    counts: Ints,  # [n] most likely tokens asked for; -1: all
    named: Sequence[Ints | None] = (),  # of n positions, where some name tokens: [count] in place of the likely ones
) -> Scores:
    """Nothing here waits for the device."""
    logprobs = logits.double()
    logprobs = logprobs - logprobs.logsumexp(dim=1, keepdim=True)
    own = logprobs.gather(1, token_ids[:, None])
    values, ids = _most_likely(logprobs, max(_wanted(counts, logits.shape[1]), default=0))
    for place, tokens in enumerate(named):
        if tokens is not None:
            ids[place, : len(tokens)] = to_device(tokens, ids.device)
            values[place, : len(tokens)] = logprobs[place, ids[place, : len(tokens)]]
    return Scores(token_ids, own[:, 0], (logprobs >= own).sum(1), ids, values)


def read_scores(
    scores: Scores,  # of n positions, on the host
    counts: Ints,  # [n], as they were scored with
    vocab_size: int,
) -> list[PositionLogprobs]:
    wanted = _wanted(counts, vocab_size)
    columns = zip(*(column.tolist() for column in scores), wanted, strict=True)
    return [
        PositionLogprobs([token, *likely[:count]], [logprob, *likely_logprobs[:count]], rank)
        for token, logprob, rank, likely, likely_logprobs, count in columns
    ]


def _wanted(counts: Ints, vocab_size: int) -> list[int]:
    return [vocab_size if count < 0 else min(int(count), vocab_size) for count in counts]


def _most_likely(
    logprobs: Tensor,  # [n, vocab_size] float64
    count: int,
) -> tuple[Tensor, Tensor]:  # values and ids, each [n, count], lower ids first among equals where all are asked for
    if count == logprobs.shape[1]:
        return torch.sort(logprobs, dim=1, descending=True, stable=True)
    values, ids = torch.topk(logprobs, count, dim=1)
    return values, ids
