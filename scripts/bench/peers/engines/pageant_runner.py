"""Pageant's model runner alone: the scheduler's core drives it in one process, two steps in flight.

Steps run in threads as the worker's do; the caller's thread schedules meanwhile.  No messages, no sockets.
"""

from __future__ import annotations

import os
import queue
import time
from typing import Any

from engine.loading.load import load_runner
from scripts.bench.common.core import WORKER, asked, core_of, forget_news
from scripts.bench.common.proc import peak_rss
from services.scheduler.main import policy_of
from services.worker.main import make_steps
from shared.config import load_settings
from shared.messages import Message, StepResult
from shared.transport.memory import MemoryOutbox, MemoryTransport


class Network(MemoryTransport):
    """What is sent over it are the results of steps; None: a step has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()

    def outbox(self) -> MemoryOutbox:
        return ToResults(self)


class ToResults(MemoryOutbox):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._results = network.results

    def send(self, address: str, message: Message) -> None:
        assert isinstance(message, StepResult)
        self._results.put(message)


class Runner:
    """Invariant: between runs nothing is in flight and the core knows no request."""

    def __init__(self, options: dict[str, Any]) -> None:
        settings = load_settings(options["settings"], environ={})
        runner = load_runner(settings, has_windows=False)
        runner.reset()  # as a worker does when it registers
        self._core = core_of(runner.capacity, policy_of(settings))
        network = Network()
        self._results = network.results
        self._steps = make_steps(runner, network, settings, lambda: network.results.put(None))
        self._num_in_flight = 0
        self.version = f"{runner.capacity.dtype}, {runner.capacity.num_blocks} blocks"

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        begin, first = time.perf_counter(), 0.0
        before = self._core.counters.num_output_tokens
        for index, (prompt, count) in enumerate(requests):
            self._core.add(asked(str(index), prompt, max_tokens=count, seed=0), now=0.0)
        while self._core.requests or self._num_in_flight:
            self._turn()
            if not first and self._core.counters.num_output_tokens > before:
                first = time.perf_counter() - begin
        return {"num_tokens": [self._take(index) for index in range(len(requests))], "first": first}

    @property
    def is_idle(self) -> bool:
        return not (self._core.requests or self._core.finished or self._num_in_flight)

    def _turn(self) -> None:
        """Keep two steps in flight, take one result in, and throw away what would go to detokenizers."""
        while plan := self._core.schedule(WORKER):
            self._steps.submit(plan)
            self._num_in_flight += 1
        result = self._results.get()
        if result is None:
            raise RuntimeError("a step has failed") from self._steps.failure
        self._num_in_flight -= 1
        self._core.apply(WORKER, result)
        forget_news(self._core)

    def _take(self, index: int) -> int:
        """The number of tokens of a finished request, which is forgotten."""
        (sequence,) = self._core.finished[str(index)].sequences
        self._core.abort(str(index))
        return sequence.num_output_tokens

    def report(self) -> dict[str, Any]:
        return {"worker_peak_rss": peak_rss(os.getpid())}


load = Runner
