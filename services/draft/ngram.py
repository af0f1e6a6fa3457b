"""Prompt lookup: the tokens that followed the last few tokens at an earlier place of the text.  No model, no torch.

The longest suffix of `shortest` to `longest` tokens that occurs earlier counts, and its earliest occurrence.
Source: prompt lookup decoding (Saxena, 2023), with the rule for ties that is customary in serving engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.draft.ending import Ending, read_ending
from services.draft.proposer import Guess
from shared.messages import AdmittedSequence, DraftCapacity
from shared.packing import unpack_tokens

UNLIMITED = 1 << 24  # tokens; more than any model's length


class NGramIndex:
    """A text that grows, and where each run of `shortest` to `longest` of its tokens ended first."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.token_ids: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._first: dict[tuple[int, ...], int] = {}  # run -> number of tokens up to its end

    def extend(self, token_ids: Iterable[int]) -> None:
        """O(new tokens * lengths)."""
        known, first = self.token_ids, self._first
        for token_id in token_ids:
            known.append(token_id)
            end = len(known)
            for length in self._lengths:
                if length <= end:
                    first.setdefault(tuple(known[end - length :]), end)

    def lookup(self, count: int) -> list[int]:
        """Up to `count` tokens that may follow: fewer where the text ends before, none where its end is new."""
        end = len(self.token_ids)
        for length in self._lengths:
            if length < end and (found := self._first[tuple(self.token_ids[end - length :])]) < end:
                return self.token_ids[found : found + count]
        return []


@dataclass(slots=True)
class _Row:
    index: NGramIndex
    ending: Ending
    guess: list[int] | None = None  # None: not looked up since the text grew


class NGramProposer:
    """A `services.draft.proposer.Proposer`.  It makes one lookup and never runs ahead."""

    def __init__(self, *, num_rows: int, max_model_len: int, shortest: int, longest: int) -> None:
        self.capacity = DraftCapacity(num_rows, max_model_len or UNLIMITED, vocab_size=0, model="ngram")
        self._lengths = (shortest, longest)
        self._rows: dict[int, _Row] = {}

    def reset(self) -> None:
        self._rows.clear()

    def open(self, sequence: AdmittedSequence) -> None:
        index = NGramIndex(*self._lengths)
        index.extend(unpack_tokens(sequence.token_ids))
        self._rows[sequence.row] = _Row(index, read_ending(sequence, self.capacity.max_model_len))

    def close(self, row: int) -> None:
        del self._rows[row]

    def commit(self, row: int, token_ids: list[int]) -> None:
        self._rows[row].index.extend(token_ids)
        self._rows[row].guess = None

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        for number, goal in goals.items():
            row = self._rows[number]
            if row.guess is None:
                row.guess = row.ending.cut(row.index.lookup(goal), len(row.index.token_ids))
        return max(goals.values(), default=1)

    def finished(self, row: int, goal: int) -> bool:
        return self._rows[row].guess is not None

    def is_behind(self, row: int) -> bool:
        return False

    def guess(self, row: int, count: int) -> Guess:
        return Guess((self._rows[row].guess or [])[:count])
