"""An open-loop generator: requests leave when they are due, whatever became of those before them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from services.cli.bench.backend import Streams
from services.cli.bench.outcome import RequestOutcome
from services.cli.bench.pacer import Pacer
from shared.metrics import Timeline
from shared.workload import LoadRequest

LEAD = 0.05  # seconds from the call to time 0 of the run


class Generator:
    """Sends a workload once.

    With a limit of concurrency a due request waits for a place.  Its latency still counts from when it was due, unless
    the load has no times of its own (all are due at once): then from when it had its place, since such a load means "as
    soon as there is room".
    """

    def __init__(self, backend: Streams, max_concurrency: int = 0) -> None:
        self._backend = backend
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._begin = 0.0

    @property
    def begin(self) -> float:
        """Time 0 of the run, by the machine's steady clock (time.perf_counter)."""
        return self._begin

    def clock(self) -> float:
        """Seconds since time 0 of the run."""
        return time.perf_counter() - self._begin

    async def send(
        self, requests: Sequence[LoadRequest], ended: Callable[[RequestOutcome], object]
    ) -> list[RequestOutcome]:
        """Send all, each when it is due; returns their outcomes in the same order once every one has ended."""
        self._begin = time.perf_counter() + LEAD
        outcomes = [RequestOutcome(Timeline(request.time)) for request in requests]
        is_paced = any(request.time != requests[0].time for request in requests)
        tasks: list[asyncio.Task[None]] = []
        all_due = asyncio.Event()

        def due(index: int) -> None:
            outcomes[index].late = max(0.0, self.clock() - requests[index].time)
            work = self._one(requests[index], outcomes[index], ended, is_paced=is_paced)
            tasks.append(asyncio.create_task(work))
            if len(tasks) == len(requests):
                all_due.set()

        pacer = Pacer([self._begin + request.time for request in requests], due)
        pacer.start()
        try:
            if requests:
                await all_due.wait()
            await asyncio.gather(*tasks)
        finally:
            pacer.stop()
            for task in tasks:
                task.cancel()
        return outcomes

    async def _one(
        self,
        request: LoadRequest,
        outcome: RequestOutcome,
        ended: Callable[[RequestOutcome], object],
        *,
        is_paced: bool,
    ) -> None:
        if self._places is not None:
            await self._places.acquire()
        try:
            outcome.sent = self.clock()
            if not is_paced and self._places is not None:
                outcome.timeline.start, outcome.late = outcome.sent, 0.0
            await self._backend.stream(request, outcome, self.clock)
        finally:
            outcome.end = self.clock()
            if self._places is not None:
                self._places.release()
        ended(outcome)


def lateness(outcomes: Sequence[RequestOutcome], tolerance: float = 0.01) -> tuple[int, float]:
    """How many requests the generator itself sent later than `tolerance` seconds after they were due, and the worst."""
    late = [outcome.late for outcome in outcomes]
    return sum(value > tolerance for value in late), max(late, default=math.nan)
