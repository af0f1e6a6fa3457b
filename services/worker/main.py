"""Assembles a worker."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import structlog

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.loading.reading import KeptPart
from services.worker.actor import WorkerActor
from services.worker.adapters import NICENESS, AdapterLoading
from services.worker.groups.rank_processes import Started
from services.worker.groups.ranks import AnyGroup, RankGroup, make_group
from services.worker.plans.overlapped import OverlappedSteps
from services.worker.plans.pipelined import PipelinedComputation
from services.worker.plans.queued import QueuedPlans
from services.worker.plans.recording import RecordedRunner
from services.worker.plans.steps import StepComputation, Steps, ThreadSteps
from shared.actor.executor import Executor, ThreadExecutor
from shared.config import Settings
from shared.messages import HoldAdapters, Tick
from shared.processes.exit_status import EXIT_FATAL
from shared.transport import Transport

log = structlog.get_logger()


class WorkerLives:
    """The workers that one process is, one after the other: with each group of ranks another one, which keeps what was
    read of the model.  A process without ranks is one worker."""

    def __init__(self, ranks: Started) -> None:
        self._ranks = ranks
        self._kept = KeptPart()
        self._group: AnyGroup | None = None

    def make(self, transport: Transport, settings: Settings) -> WorkerActor:
        actor = make(transport, settings, self._ranks, self._kept)
        self._group = actor.ranks
        return actor

    def goes_on(self, status: int) -> bool:
        """Whether there is another one, after one that ended with this exit status."""
        group, self._group = self._group, None
        if status != EXIT_FATAL or not isinstance(group, RankGroup) or not group.may_form_again:
            return False
        log.warning("group_forms_again", reason=group.failure)
        group.leave()
        self._ranks = Started(group.next_group())
        del group
        gc.unfreeze()  # of the worker that was, with its KV cache
        gc.collect()
        return True


def make_steps(runner: ModelRunner, transport: Transport, settings: Settings, on_failure: Callable[[], None]) -> Steps:
    """In threads, as this runner's steps go best."""
    if path := settings.observation.record_steps:
        return ThreadSteps(StepComputation(RecordedRunner(runner, Path(path))), transport, on_failure)
    if runner.capacity.device == "cuda":
        return OverlappedSteps(runner, transport, on_failure)
    if runner.queues:
        return QueuedPlans(runner, transport, on_failure)
    if settings.engine.has_stages:
        stages = PipelinedComputation(runner, settings.engine.pipeline_parallel_size)
        return ThreadSteps(stages, transport, on_failure)
    return ThreadSteps(StepComputation(runner), transport, on_failure)


def make(
    transport: Transport, settings: Settings, ranks: Started | None = None, kept: KeptPart | None = None
) -> WorkerActor:
    """One worker that loads the model once it runs, and steps in a thread; `ranks`: the others of its group; `kept`:
    as `load_runner` has it."""
    loop = asyncio.get_running_loop()

    def thread_steps(runner: ModelRunner, transport: Transport) -> Steps:
        return make_steps(runner, transport, settings, wake)

    def thread_loading(loading: AdapterLoading, transport: Transport) -> Executor[HoldAdapters]:
        return ThreadExecutor(loading, transport, name="adapters", on_failure=wake, niceness=NICENESS)

    def wake() -> None:
        loop.call_soon_threadsafe(actor.post, Tick())

    group = make_group(settings, ranks or Started(), on_failure=wake)

    def load() -> ModelRunner:
        return load_runner(settings, ranks=group, kept=None if group is None else kept, prepares=True)

    actor = WorkerActor(transport, settings, load, thread_steps, thread_loading, group)
    return actor
