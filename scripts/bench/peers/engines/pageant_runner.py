"""Pageant's model runner alone: the scheduler's core drives it in one process, two steps in flight.

Threads launch steps and wait for them as the worker's do; the caller's thread schedules meanwhile.  No messages, no
sockets.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

from engine.execution.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.proc import peak_rss
from services.scheduler.main import policy_of
from services.scheduler.scheduler import Scheduler
from shared.config import load_settings
from shared.messages import AddRequest, RequestHeader, StepPlan, StepResult
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

WORKER = "worker"
Plans = queue.SimpleQueue[StepPlan]
Launched = queue.SimpleQueue[PendingResult | BaseException]
Results = queue.SimpleQueue[StepResult | BaseException]


class Runner:
    """Invariant: between runs nothing is in flight and the core knows no request."""

    def __init__(self, options: dict[str, Any]) -> None:
        settings = load_settings(options["settings"], environ={})
        runner = load_runner(settings, has_windows=False)
        runner.reset()  # as a worker does when it registers
        self._core = Scheduler(policy_of(settings))
        self._core.set_detokenizers(["detokenizer"])
        self._core.add_worker(WORKER, 1, runner.capacity)
        self._plans: Plans = queue.SimpleQueue()
        self._results: Results = queue.SimpleQueue()
        self._num_in_flight = 0
        self.version = f"{runner.capacity.dtype}, {runner.capacity.num_blocks} blocks"
        launched: Launched = queue.SimpleQueue()
        for target, arguments in ((launch, (runner, self._plans, launched)), (finish, (launched, self._results))):
            threading.Thread(target=target, args=arguments, daemon=True).start()

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        begin, first = time.perf_counter(), 0.0
        before = self._core.counters.num_output_tokens
        for index, (prompt, count) in enumerate(requests):
            self._core.add(_request(index, prompt, count), now=0.0)
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
            self._plans.put(plan)
            self._num_in_flight += 1
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._num_in_flight -= 1
        self._core.apply(WORKER, result)
        self._core.outbound.take_batches()
        self._core.journal.take()

    def _take(self, index: int) -> int:
        """The number of tokens of a finished request, which is forgotten."""
        (sequence,) = self._core.finished[str(index)].sequences
        self._core.abort(str(index))
        return sequence.num_output_tokens

    def report(self) -> dict[str, Any]:
        return {"worker_peak_rss": peak_rss(os.getpid())}


def launch(runner: ModelRunner, plans: Plans, launched: Launched) -> None:
    """One thread, as `services.worker.overlapped` has it."""
    try:
        while True:
            launched.put(runner.launch(plans.get()))
    except BaseException as error:
        launched.put(error)


def finish(launched: Launched, results: Results) -> None:
    """The other one."""
    try:
        while True:
            pending = launched.get()
            results.put(pending if isinstance(pending, BaseException) else pending.finish())
    except BaseException as error:
        results.put(error)


def _request(index: int, prompt: list[int], count: int) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)
    resolved = params.resolved(GenerationDefaults(), max_tokens=count)
    return AddRequest(RequestHeader(str(index), "gateway"), resolved, pack_tokens(prompt), [])


load = Runner
