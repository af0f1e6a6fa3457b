"""The events of requests, which the shell logs; the core itself has no clock and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.scheduler.blocks.clock import Clock
from services.scheduler.state.sequence import Request, Sequence
from shared.messages import RequestHeader
from shared.processes.logging import request_logger


@dataclass(frozen=True, slots=True)
class Note:
    event: str
    header: RequestHeader
    fields: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0  # when it was done, on the core's clock


@dataclass(frozen=True, slots=True)
class Alarm:
    """An event that should never happen: it is logged at once, and an incident is kept for the operator."""

    event: str
    fields: dict[str, int | str]


class EventJournal:
    """Notes and alarms since they were last taken."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._notes: list[Note] = []
        self._alarms: list[Alarm] = []

    def alarm(self, event: str, **fields: int | str) -> None:
        self._alarms.append(Alarm(event, fields))

    def take_alarms(self) -> list[Alarm]:
        alarms, self._alarms = self._alarms, []
        return alarms

    def request(self, event: str, request: Request, **fields: Any) -> None:
        self._notes.append(Note(event, request.header, fields, self._clock.now))

    def sequence(self, event: str, sequence: Sequence, **fields: Any) -> None:
        self._notes.append(Note(event, sequence.request.header, {"index": sequence.index, **fields}, self._clock.now))

    def take(self) -> list[Note]:
        notes, self._notes = self._notes, []
        return notes


def write_notes(log: Any, notes: list[Note]) -> None:
    for note in notes:
        request_logger(log, note.header).info(note.event, at=note.at, **note.fields)
