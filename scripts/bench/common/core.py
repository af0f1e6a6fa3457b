"""The scheduler's core in the process of a bench, with one worker: as in a deployment, without its wires."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.execution.outputs.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import Adapter, AddRequest, RequestHeader, StepPlan, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams

WORKER = "worker"


class CoreStep(NamedTuple):
    """Times are those of time.perf_counter."""

    plan: StepPlan
    result: StepResult
    begin: float  # before the host launched it
    launched: float
    end: float  # when the core had its result


def core_of(capacity: WorkerCapacity, policy: Policy) -> Scheduler:
    """Of one worker."""
    core = Scheduler(policy)
    core.set_detokenizers(["detokenizer"])
    core.add_worker(WORKER, 1, capacity)
    return core


def asked(name: str, prompt: Sequence[int], *, adapter: Adapter | None = None, **sampling: Any) -> AddRequest:
    """Greedy, and exactly `max_tokens` tokens, where `sampling` does not say otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling)
    resolved = params.resolved(GenerationDefaults(), max_tokens=16)
    return AddRequest(RequestHeader(name, "gateway", adapter=adapter), resolved, pack_tokens(prompt))


def forget_news(core: Scheduler) -> None:
    """Throw away what would go to detokenizers and into the log."""
    core.outbound.take_batches()
    core.journal.take()


def steps(core: Scheduler, runner: ModelRunner) -> Iterator[CoreStep]:
    """Until nothing is left to do.  Each is launched before the result of the one before it, as in a worker."""
    in_flight: deque[tuple[StepPlan, PendingResult, float, float]] = deque()
    while True:
        while plan := core.schedule(WORKER, time.perf_counter()):
            begin = time.perf_counter()
            in_flight.append((plan, runner.launch(plan), begin, time.perf_counter()))
        if not in_flight:
            return
        plan, pending, begin, launched = in_flight.popleft()
        result = pending.finish()
        core.apply(WORKER, result, time.perf_counter())
        forget_news(core)
        yield CoreStep(plan, result, begin, launched, time.perf_counter())
