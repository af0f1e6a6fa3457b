"""Log-probabilities that a step's rows asked for: scored on the device, piece by piece, read when the step is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.execution.outputs.sampled_tokens import YieldedTokens
from engine.modeling.batch import Ints
from engine.sampling.logprobs import Scores, read_scores, score
from shared.messages.steps import TokenLogprobs

MOST_ROWS = 64  # scored at a time: the float64 copies of their logits are the memory that this takes


@dataclass(frozen=True, slots=True)
class Scored:
    """Of some positions, in order."""

    pieces: list[Scores]  # on their way to the host
    counts: Ints  # [n] most likely tokens asked for; -1: all
    vocab_size: int

    def read(self) -> list[TokenLogprobs]:
        """Once what was launched until they were made is done."""
        found: list[TokenLogprobs] = []
        for piece in self.pieces:
            counts = self.counts[len(found) : len(found) + len(piece.token_ids)]
            found += [TokenLogprobs(*one) for one in read_scores(piece, counts, self.vocab_size)]
        return found


def score_rows(
    logits_of: Callable[[slice], Tensor],  # rows -> [their number, vocab_size] float32
    token_ids: Tensor,  # [n] int64
    counts: Ints,  # [n]
    vocab_size: int,
    named: Sequence[Ints | None] = (),  # of n positions, where some name the tokens that they want
) -> Scored:
    pieces = []
    for start in range(0, len(token_ids), MOST_ROWS):
        rows = slice(start, start + MOST_ROWS)
        pieces.append(score(logits_of(rows), token_ids[rows], counts[rows], named[rows]).to_host())
    return Scored(pieces, counts, vocab_size)


@dataclass(frozen=True, slots=True)
class SampledScores:
    """Of sampled positions: all that may come out."""

    positions: Ints  # [n], ascending
    scored: Scored

    def read(self, yielded: YieldedTokens) -> list[TokenLogprobs | None]:  # num_yielded
        found: list[TokenLogprobs | None] = [None] * len(yielded.places)
        places = yielded.places.searchsorted(self.positions)
        is_yielded = np.isin(self.positions, yielded.places)
        for place, comes_out, one in zip(places.tolist(), is_yielded.tolist(), self.scored.read(), strict=True):
            if comes_out:
                found[place] = one
        return found
