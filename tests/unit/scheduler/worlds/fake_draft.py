"""A draft without a model: it checks that it is told everything in order, and guesses right as often as it shall."""

from __future__ import annotations

import random

from shared.messages import DraftCapacity, DraftProposals, DraftUpdate
from shared.packing import unpack_tokens
from tests.unit.scheduler.worlds.fake_worker import VOCAB, next_token


class FakeDraft:
    """Follows rows as a draft does; forgets one now and then, as a draft may."""

    def __init__(self, seed: int = 0, *, skill: float = 0.8, num_rows: int = 16, forgets: float = 0.0) -> None:
        self.capacity = DraftCapacity(num_rows, 100, VOCAB, "fake")
        self.rows: dict[int, tuple[list[int], int]] = {}  # tokens told and seed, by row
        self._random = random.Random(seed)
        self._skill = skill
        self._forgets = forgets

    def answer(self, update: DraftUpdate) -> list[DraftProposals]:
        """One answer, or two where it is to run ahead."""
        for row in update.closed_rows:
            self.rows.pop(row, None)
        for opened in update.opened:
            assert opened.row not in self.rows, "a row is opened twice"
            self.rows[opened.row] = unpack_tokens(opened.token_ids), opened.seed
        wanted, lost = self._commit(update)
        first = self._propose(update, wanted, lost)
        if not update.num_ahead:
            return [first]
        return [first, self._propose(update, {row: n + update.num_ahead for row, n in wanted.items()}, [])]

    def _commit(self, update: DraftUpdate) -> tuple[dict[int, int], list[int]]:
        wanted, lost, cursor = {}, [], 0
        for row, num_tokens, num_new, num_wanted in zip(
            update.rows, update.num_tokens, update.num_new, update.num_wanted, strict=True
        ):
            new = update.new_token_ids[cursor : cursor + num_new]
            cursor += num_new
            if self._random.random() < self._forgets:
                self.rows.pop(row, None)
            if row not in self.rows:
                lost.append(row)
                continue
            tokens, _ = self.rows[row]
            assert len(tokens) == num_tokens, "a draft was not told everything"
            tokens += new
            wanted[row] = num_wanted
        return wanted, lost

    def _propose(self, update: DraftUpdate, wanted: dict[int, int], lost: list[int]) -> DraftProposals:
        proposals = {row: self._guess(row, count, update.update_id) for row, count in wanted.items() if count}
        return DraftProposals(
            epoch=update.epoch,
            update_id=update.update_id,
            rows=list(proposals),
            num_tokens=[len(self.rows[row][0]) for row in proposals],
            num_draft_tokens=[len(tokens) for tokens in proposals.values()],
            draft_token_ids=[token for tokens in proposals.values() for token in tokens],
            lost_rows=lost,
            draft_time=0.001,
        )

    def _guess(self, row: int, count: int, update_id: int) -> list[int]:
        """The same for the same row and update, so that running ahead goes on where it began."""
        luck = random.Random(hash((row, update_id, self._skill)))
        tokens, seed = self.rows[row]
        guess: list[int] = []
        while len(guess) < count:
            right = next_token(tokens + guess, seed)
            guess.append(right if luck.random() < self._skill else (right + 1) % VOCAB)
        return guess
