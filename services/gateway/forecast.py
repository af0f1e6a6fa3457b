"""When a request that comes now would have its first token, judged by those before it.  No I/O; time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MEMORY = 64  # first tokens that are remembered
MIN_SAMPLES = 8  # before which nothing is foretold
REACH = 2  # times as long a queue as was ever seen to pass is the longest that anything is known of


@dataclass(frozen=True, slots=True)
class Waiting:
    since: float
    num_ahead: int


class Forecast:
    """Who waits for a first token, and how long a place in that queue has taken of late.

    A place is judged by the sums over many waits, not wait by wait: the long ones, which tell something of a queue,
    then outweigh those that met none.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._seen: deque[tuple[float, int]] = deque(maxlen=MEMORY)  # (seconds, places)

    def __len__(self) -> int:
        return len(self._waiting)

    def opened(self, request_id: str, now: float) -> None:
        self._waiting[request_id] = Waiting(now, len(self._waiting))

    def heard(self, request_id: str, now: float) -> None:
        """Output of a request came; only its first counts."""
        if waited := self._waiting.pop(request_id, None):
            self._seen.append((now - waited.since, waited.num_ahead + 1))

    def closed(self, request_id: str) -> None:
        """A request ended, perhaps without any output."""
        self._waiting.pop(request_id, None)

    @property
    def seconds(self) -> float:
        """How long a first token would take; 0 where too little is known."""
        if len(self._seen) < MIN_SAMPLES:
            return 0.0
        per_place = sum(seconds for seconds, _ in self._seen) / sum(places for _, places in self._seen)
        longest = max(places for _, places in self._seen)
        return per_place * min(len(self._waiting) + 1, REACH * longest)
