"""When a request that comes now would have its first token, and its last, judged by those before it.

No I/O; time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 64  # requests that are remembered
MIN_SAMPLES = 8  # before which nothing is predicted
REACH = 2  # times the longest queue that was seen: a wait behind a longer queue is predicted as behind that
SAFETY = 1.25  # where many wait, a request that is admitted at the limit would be late half of the time
MAX_TENANTS = 1024


@dataclass(slots=True)
class Progress:
    """One request: since when, behind how many, and when its first output came."""

    since: float
    num_ahead: int
    first: float = 0.0


class Forecast:
    """One queue: the requests that wait in it for a first token, and how long a place and an output took of late.

    A place is judged by the sums over many waits, not wait by wait: the long ones, which show the queue, then
    outweigh those that met none.
    """

    def __init__(self) -> None:
        self._open: dict[str, Progress] = {}
        self._num_waiting = 0
        self._waits: deque[tuple[float, int]] = deque(maxlen=MEMORY)  # (seconds, places)
        self._outputs: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # seconds of an output, and of a token of it

    def __len__(self) -> int:
        """How many wait for a first token."""
        return self._num_waiting

    @property
    def is_empty(self) -> bool:
        return not self._open

    def opened(self, request_id: str, now: float) -> None:
        self._open[request_id] = Progress(now, self._num_waiting)
        self._num_waiting += 1

    def heard(self, request_id: str, now: float) -> None:
        """Output of a request came; its first ends its wait."""
        request = self._open.get(request_id)
        if request is not None and not request.first:
            request.first = now
            self._num_waiting -= 1
            self._waits.append((now - request.since, request.num_ahead + 1))

    def closed(self, request_id: str, now: float, num_tokens: int) -> None:
        """A request ended, perhaps without any output; `num_tokens` 0: before its end."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        if not request.first:
            self._num_waiting -= 1
        elif num_tokens > 1:
            self._outputs.append((now - request.first, (now - request.first) / (num_tokens - 1)))

    @property
    def wait(self) -> float:
        """Seconds that a first token would take; 0 where too little is known."""
        if len(self._waits) < MIN_SAMPLES:
            return 0.0
        per_place = sum(seconds for seconds, _ in self._waits) / sum(places for _, places in self._waits)
        longest = max(places for _, places in self._waits)
        return per_place * min(self._num_waiting + 1, REACH * longest)

    def output(self, max_tokens: int | None) -> float:
        """Seconds that most outputs take from first token to last, or so many tokens where that is less."""
        if len(self._outputs) < MIN_SAMPLES:
            return 0.0
        whole = _most(seconds for seconds, _ in self._outputs)
        if max_tokens is None:
            return whole
        return min(whole, max(0, max_tokens - 1) * _most(per_token for _, per_token in self._outputs))

    def needed(self, max_tokens: int | None) -> float:
        """Seconds within which a request cannot be served.

        Where no request waits, this one may be as quick as the quickest, so only a first token is counted.  Where there
        is a queue, each request in it that will be late makes others late for nothing.
        """
        return SAFETY * self.wait + self.output(max_tokens) if self._num_waiting else self.wait


def _most(values: Iterable[float]) -> float:
    """What three of four do not exceed."""
    ordered = sorted(values)
    return ordered[3 * len(ordered) // 4]


class Forecasts:
    """One queue for each tenant, as they share what there is; those not heard of for longest are forgotten."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, Forecast] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(forecast) for forecast in self._tenants.values())

    def of(self, tenant: str) -> Forecast:
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        else:
            self._tenants[tenant] = Forecast()
            if len(self._tenants) > MAX_TENANTS:
                self._forget_one()
        return self._tenants[tenant]

    def _forget_one(self) -> None:
        """Of those without a request; the newest, which has none yet, is not meant."""
        for name in list(self._tenants)[:-1]:
            if self._tenants[name].is_empty:
                del self._tenants[name]
                return
