"""Assembles a worker."""

from __future__ import annotations

import asyncio

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from services.worker.actor import WorkerActor
from services.worker.adapters import AdapterLoading
from services.worker.overlapped import OverlappedSteps
from services.worker.pipelined import PipelinedSteps
from services.worker.rank_processes import Started
from services.worker.ranks import make_group
from services.worker.recording import recorded
from services.worker.steps import Steps, ThreadSteps
from shared.actor.executor import Executor, ThreadExecutor
from shared.config import Settings
from shared.messages import HoldAdapters, Tick
from shared.transport import Transport


def make(transport: Transport, settings: Settings, ranks: Started | None = None) -> WorkerActor:
    """One worker that loads the model once it runs, and steps in a thread; `ranks`: the others of its group."""
    loop = asyncio.get_running_loop()

    def thread_steps(runner: ModelRunner, transport: Transport) -> Steps:
        if runner.capacity.device == "cuda" and not settings.observation.record_steps:
            return OverlappedSteps(runner, transport, on_failure=wake)
        if settings.engine.has_stages and not settings.observation.record_steps:
            return PipelinedSteps(runner, transport, settings.engine.pipeline_parallel_size, on_failure=wake)
        return ThreadSteps(recorded(runner, settings.observation.record_steps), transport, on_failure=wake)

    def thread_loading(loading: AdapterLoading, transport: Transport) -> Executor[HoldAdapters]:
        return ThreadExecutor(loading, transport, name="adapters", on_failure=wake)

    def wake() -> None:
        loop.call_soon_threadsafe(actor.post, Tick())

    group = make_group(settings, ranks or Started(), on_failure=wake)

    def load() -> ModelRunner:
        return load_runner(settings, ranks=group)

    actor = WorkerActor(transport, settings, load, thread_steps, thread_loading, group)
    return actor
