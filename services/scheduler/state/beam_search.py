"""Beam search by itself: from the likeliest tokens behind each beam to the beams of the next step, and to the answer.

The rules are those of transformers' `GenerationMixin._beam_search`, so that the same model gives the same sequences:

- of all continuations of all beams the `width` likeliest may end; those that do are kept, the best `width` of them,
  by log-probability / length ** length_penalty, the end token counting as one of the length;
- the `width` likeliest that do not end go on;
- it is over when all continuations end by their length, or as `early_stopping` sets.

Knows slots, tokens and scores; nothing of blocks, rows or workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shared.messages import TokenLogprobs
from shared.requests.beam import Beam, EarlyStopping


class Continuation(NamedTuple):
    """One token more behind a beam."""

    score: float  # log-probability of the whole output
    source: int  # slot of the beam
    place: int  # of the token among the candidates behind it, likeliest first
    token_id: int


class Move(NamedTuple):
    """One beam of the next step: what stands at `source`, and one token more, at `slot`."""

    slot: int
    source: int
    token_id: int
    is_taken: bool  # whether the worker that computed `source` has put this token behind it already
    logprobs: TokenLogprobs | None  # of the token, for the client


class Hypothesis(NamedTuple):
    """One sequence that has come to its end."""

    score: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    end_id: int | None  # the token that ended it; None: its length


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """What a beam has made so far; the log-probabilities only where the client wants them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Tokens of an output before which none ends it, and with which it ends in any case."""

    shortest: int
    longest: int


class BeamSearch:
    """One request's search.  Slots are 0 ... width - 1; at first there is one beam, at slot 0, with no output.

    Invariant: `answers` holds the candidates of the present step, for some of the slots in `scores`.
    """

    def __init__(self, beam: Beam, end_ids: frozenset[int], num_logprobs: int | None) -> None:
        """`num_logprobs`: how many of the likeliest tokens at each position the client gets; None: none."""
        self.beam = beam
        self.end_ids = end_ids
        self.num_logprobs = num_logprobs
        self.scores: dict[int, float] = {0: 0.0}
        self.answers: dict[int, TokenLogprobs] = {}
        self.hypotheses: list[Hypothesis] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """Tokens that have to be known behind each beam: `width` that go on, and all that might end before them."""
        return self.beam.width + len(self.end_ids)

    @property
    def is_ready(self) -> bool:
        """Whether all beams have their candidates."""
        return self.answers.keys() == self.scores.keys()

    def has_answer(self, slot: int) -> bool:
        return slot in self.answers

    def hear(self, slot: int, candidates: TokenLogprobs) -> None:
        """The candidates behind a beam: the token that the worker took, then the likeliest in order."""
        self.answers[slot] = candidates

    def advance(self, outputs: Mapping[int, BeamOutput], bounds: LengthBounds) -> list[Move]:
        """Use the answers up: the beams of the next step, best first; none where the search is over.

        `outputs` are those of all beams, by slot, and all of one length.
        """
        length = 1 + len(next(iter(outputs.values())).token_ids)
        going: list[Continuation] = []
        for rank, one in enumerate(self._continuations(self.end_ids if length < bounds.shortest else frozenset())):
            if length < bounds.longest and one.token_id not in self.end_ids:
                going.append(one)
            elif rank < self.beam.width:
                self._end(one, outputs[one.source], length)
        if not going or self._is_over(going[0].score, length, bounds.longest):
            return []
        return self._go_on(going[: self.beam.width])

    def _continuations(self, forbidden: frozenset[int]) -> list[Continuation]:
        """The likeliest first."""
        found = [
            Continuation(self.scores[slot] + logprob, slot, place, token_id)
            for slot, known in self.answers.items()
            for place, (token_id, logprob) in enumerate(zip(known.token_ids[1:], known.logprobs[1:], strict=True))
            if token_id not in forbidden
        ]
        return sorted(found, key=lambda one: (-one.score, one.source, one.place))

    def _end(self, one: Continuation, output: BeamOutput, length: int) -> None:
        logprobs = output.logprobs
        if (known := self._for_client(one)) is not None:
            logprobs = [*logprobs, known]
        end_id = one.token_id if one.token_id in self.end_ids else None
        score = self._score(one.score, length)
        self.hypotheses.append(Hypothesis(score, [*output.token_ids, one.token_id], logprobs, end_id))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.beam.width :]

    def _for_client(self, one: Continuation) -> TokenLogprobs | None:
        if self.num_logprobs is None:
            return None
        known, count = self.answers[one.source], self.num_logprobs
        ids, logprobs = known.token_ids[1:], known.logprobs[1:]
        return TokenLogprobs([one.token_id, *ids[:count]], [logprobs[one.place], *logprobs[:count]], one.place + 1)

    def _is_over(self, best: float, length: int, longest: int) -> bool:
        if len(self.hypotheses) < self.beam.width:
            return False
        if self.beam.early_stopping is EarlyStopping.FIRST:
            return True
        grows = self.beam.early_stopping is EarlyStopping.NEVER and self.beam.length_penalty > 0
        return self._score(best, longest if grows else length) <= self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        scale: float = float(length) ** self.beam.length_penalty
        return logprob / scale

    def _go_on(self, going: list[Continuation]) -> list[Move]:
        """Give each a slot: the best behind each beam stays where that is, the others take what is free."""
        stays: dict[int, Continuation] = {}
        for one in going:
            stays.setdefault(one.source, one)
        free = iter([slot for slot in range(self.beam.width) if slot not in stays])
        slots = [one.source if stays[one.source] is one else next(free) for one in going]
        moves = [self._move(slot, one) for slot, one in zip(slots, going, strict=True)]
        self.scores = {slot: one.score for slot, one in zip(slots, going, strict=True)}
        self.answers = {}
        return moves

    def _move(self, slot: int, one: Continuation) -> Move:
        is_taken = self.answers[one.source].token_ids[0] == one.token_id
        return Move(slot, one.source, one.token_id, is_taken, self._for_client(one))
