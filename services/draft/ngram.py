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
NEAR = 16  # tokens to read, with which a row is looked up beside those that have read all of theirs
PIECE = 4096  # tokens of one piece of work: heartbeats, and updates that come meanwhile, wait for its end


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
    unread: list[int]  # tokens behind those of the index
    guess: list[int] | None = None  # None: not looked up since the text grew

    @property
    def is_behind(self) -> bool:
        return len(self.unread) > NEAR

    def read(self, count: int) -> None:
        self.index.extend(self.unread[:count])
        del self.unread[:count]

    def look_up(self, goal: int) -> None:
        self.read(len(self.unread))
        self.guess = self.ending.cut(self.index.lookup(goal), len(self.index.token_ids))


class NGramProposer:
    """A `services.draft.proposer.Proposer`.  It makes one lookup and never runs ahead.

    Texts are read when something is wanted of them, long ones piece by piece.
    """

    def __init__(self, *, num_rows: int, max_model_len: int, shortest: int, longest: int) -> None:
        self.capacity = DraftCapacity(num_rows, max_model_len or UNLIMITED, vocab_size=0, model="ngram")
        self._lengths = (shortest, longest)
        self._rows: dict[int, _Row] = {}

    def reset(self) -> None:
        self._rows.clear()

    def open(self, sequence: AdmittedSequence) -> None:
        ending = read_ending(sequence, self.capacity.max_model_len)
        self._rows[sequence.row] = _Row(NGramIndex(*self._lengths), ending, unpack_tokens(sequence.token_ids))

    def close(self, row: int) -> None:
        del self._rows[row]

    def commit(self, row: int, token_ids: list[int]) -> None:
        self._rows[row].unread += token_ids
        self._rows[row].guess = None

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        lacking = [(self._rows[row], goal) for row, goal in goals.items() if not self.finished(row, goal)]
        near = [(row, goal) for row, goal in lacking if not row.is_behind]
        for row, goal in near:
            row.look_up(goal)
        if lacking and not near:
            self._read([row for row, _ in lacking])
            return 1
        return max(goals.values(), default=1)

    def _read(self, rows: list[_Row]) -> None:
        """A piece of their texts, the shortest first."""
        left = PIECE
        for row in sorted(rows, key=lambda row: len(row.unread)):
            count = min(left, len(row.unread))
            row.read(count)
            left -= count

    def finished(self, row: int, goal: int) -> bool:
        return self._rows[row].guess is not None

    def is_behind(self, row: int) -> bool:
        return self._rows[row].is_behind

    def guess(self, row: int, count: int) -> Guess:
        return Guess((self._rows[row].guess or [])[:count])
