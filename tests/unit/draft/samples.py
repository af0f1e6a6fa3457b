"""Updates, and a proposer that counts instead of thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.draft.proposer import Guess
from shared.errors import ProtocolError
from shared.messages import AdmittedSequence, DraftCapacity, DraftUpdate
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.sampling import SamplingParams

FORBIDDEN = 666  # a token that the counting proposer cannot follow


def admitted(row: int, token_ids: Sequence[int], **params: Any) -> AdmittedSequence:
    eos = params.pop("eos_token_ids", [])
    return AdmittedSequence(row, pack_tokens(token_ids), len(token_ids), SamplingParams(**params), 0, eos)


def update(
    update_id: int,
    told: Mapping[int, tuple[int, list[int], int]] | None = None,
    *,
    opened: Sequence[AdmittedSequence] = (),
    closed: Sequence[int] = (),
    epoch: int = 1,
    num_ahead: int = 0,
) -> DraftUpdate:
    """`told`: row -> (tokens told before, new ones, wanted)."""
    told = told or {}
    return DraftUpdate(
        epoch=epoch,
        update_id=update_id,
        closed_rows=list(closed),
        opened=list(opened),
        rows=list(told),
        num_tokens=[before for before, _, _ in told.values()],
        num_new=[len(new) for _, new, _ in told.values()],
        new_token_ids=[token_id for _, new, _ in told.values() for token_id in new],
        num_wanted=[wanted for _, _, wanted in told.values()],
        num_ahead=num_ahead,
    )


class Counter:
    """Guesses the next number, one per row and piece of work."""

    def __init__(self, num_rows: int = 8) -> None:
        self.capacity = DraftCapacity(num_rows, 1000, 1000, "counter")
        self.told: dict[int, list[int]] = {}
        self.guesses: dict[int, list[int]] = {}
        self.stuck: set[int] = set()  # rows that can have no guess now
        self.unread: dict[int, int] = {}  # row -> pieces of work until it begins to guess
        self.num_pieces = 0

    def reset(self) -> None:
        self.told.clear()
        self.guesses.clear()

    def open(self, sequence: AdmittedSequence) -> None:
        assert sequence.row not in self.told
        token_ids = unpack_tokens(sequence.token_ids)
        if FORBIDDEN in token_ids:
            raise ProtocolError("forbidden")
        self.told[sequence.row], self.guesses[sequence.row] = token_ids, []

    def close(self, row: int) -> None:
        del self.told[row], self.guesses[row]

    def commit(self, row: int, token_ids: list[int]) -> None:
        if FORBIDDEN in token_ids:
            raise ProtocolError("forbidden")
        guess = self.guesses[row]
        self.guesses[row] = guess[len(token_ids) :] if guess[: len(token_ids)] == token_ids else []
        self.told[row] += token_ids

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        self.num_pieces += 1
        able = [row for row, goal in goals.items() if not self.finished(row, goal)]
        for row in [row for row in able if not self.unread.get(row)] or able:
            if self.unread.get(row):
                self.unread[row] -= 1
            else:
                self.guesses[row].append((self.told[row] + self.guesses[row])[-1] + 1)
        return 1

    def finished(self, row: int, goal: int) -> bool:
        return row in self.stuck or len(self.guesses[row]) >= goal

    def is_behind(self, row: int) -> bool:
        return bool(self.unread.get(row))

    def guess(self, row: int, count: int) -> Guess:
        return Guess(self.guesses[row][:count])
