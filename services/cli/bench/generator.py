"""An open-loop generator: requests leave when they are due, whatever happens to those before them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import msgspec

from shared.client import ModelCard
from shared.metrics import Acceptance, Timeline
from shared.workload import LoadRequest

LEAD = 0.05  # seconds from the call to time 0 of the run


class RequestOutcome(msgspec.Struct):
    """Times are seconds of one clock, from the run's start.

    `timeline.start` is when the request was meant to be sent: latencies count from there, so that a client that comes
    late, or waits for a place, hides nothing.  `sent` is when it was.
    """

    timeline: Timeline
    sent: float = 0.0
    late: float = 0.0  # seconds by which the generator itself was behind, without waiting for a place
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str = ""
    phases: dict[str, float] = {}  # seconds by phase, where the server was asked for them

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.timeline.times)

    @property
    def num_output_tokens(self) -> int:
        return self.timeline.num_tokens


def start_header() -> tuple[str, str]:
    """The header that names the time of sending, so that client and server count from there."""
    return "x-request-start", f"t={time.time():.6f}"


class Streams(Protocol):
    """How one request reaches a server."""

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        """Send it and note in `outcome` the outputs, at `clock()`'s times; a failure goes into `outcome.error`."""


class ServerBackend(Streams, Protocol):
    """A server behind one interface."""

    vocab_size: int

    async def model(self, patience: float) -> ModelCard:
        """What is served, once the server answers; fails after `patience` seconds.  What it does not say is 0."""

    async def acceptance(self) -> Acceptance:
        """What speculation has yielded since the server's start; all zero where the interface has no such figures."""

    async def close(self) -> None: ...


@contextmanager
def paced(times: Sequence[float], due: Callable[[int], None]) -> Iterator[None]:
    """Within, `due(index)` is called in the loop at each of the given times, of time.perf_counter and in order.

    A thread sleeps to within some tens of microseconds; the timers of event loops round up to milliseconds, which would
    go into every latency.
    """
    loop, stopped = asyncio.get_running_loop(), threading.Event()

    def run() -> None:
        for index, moment in enumerate(times):
            if (left := moment - time.perf_counter()) > 0:
                time.sleep(left)
            if stopped.is_set():
                return
            loop.call_soon_threadsafe(due, index)

    threading.Thread(target=run, name="pacer", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


class Generator:
    """Sends a workload once.

    With a limit of concurrency a due request waits for a place.  Its latency still counts from when it was due, unless
    the load has no times of its own (all are due at once): then from when it had its place, since such a load means "as
    soon as there is room".
    """

    def __init__(self, backend: Streams, max_concurrency: int = 0) -> None:
        self._backend = backend
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.begin = 0.0  # time 0 of the run, by the machine's steady clock (time.perf_counter)

    def clock(self) -> float:
        """Seconds since time 0 of the run."""
        return time.perf_counter() - self.begin

    async def send(
        self, requests: Sequence[LoadRequest], ended: Callable[[RequestOutcome], object]
    ) -> list[RequestOutcome]:
        """Send all, each when it is due; returns their outcomes in the same order once every one has ended."""
        self.begin = time.perf_counter() + LEAD
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

        try:
            with paced([self.begin + request.time for request in requests], due):
                if requests:
                    await all_due.wait()
                await asyncio.gather(*tasks)
        finally:
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
        async with self._places or nullcontext():
            try:
                outcome.sent = self.clock()
                if not is_paced and self._places is not None:
                    outcome.timeline.start, outcome.late = outcome.sent, 0.0
                await self._backend.stream(request, outcome, self.clock)
            finally:
                outcome.end = self.clock()
        ended(outcome)


def lateness(outcomes: Sequence[RequestOutcome], tolerance: float = 0.01) -> tuple[int, float]:
    """How many requests the generator itself sent later than `tolerance` seconds after they were due, and the worst."""
    late = [outcome.late for outcome in outcomes]
    return sum(value > tolerance for value in late), max(late, default=math.nan)
