"""What the core did to requests, for the shell to log; the core itself has no clock and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.sequence import Request, Sequence
from shared.messages import RequestHeader


@dataclass(frozen=True, slots=True)
class Note:
    event: str
    header: RequestHeader
    fields: dict[str, int | str] = field(default_factory=dict)


class Journal:
    """Notes since they were last taken."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def request(self, event: str, request: Request, **fields: int | str) -> None:
        self._notes.append(Note(event, request.header, fields))

    def sequence(self, event: str, sequence: Sequence, **fields: int | str) -> None:
        self._notes.append(Note(event, sequence.request.header, {"index": sequence.index, **fields}))

    def take(self) -> list[Note]:
        notes, self._notes = self._notes, []
        return notes
