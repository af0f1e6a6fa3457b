"""Assembles a worker."""

from __future__ import annotations

import asyncio

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from services.worker.actor import WorkerActor
from services.worker.overlapped import OverlappedSteps
from services.worker.recording import recorded
from services.worker.steps import Steps, ThreadSteps
from shared.config import Settings
from shared.messages import Tick
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> WorkerActor:
    """One worker that loads the model once it runs, and steps in a thread of its own."""
    loop = asyncio.get_running_loop()

    def thread_steps(runner: ModelRunner, transport: Transport) -> Steps:
        def wake() -> None:
            loop.call_soon_threadsafe(actor.post, Tick())

        if runner.capacity.device == "cuda" and not settings.observation.record_steps:
            return OverlappedSteps(runner, transport, on_failure=wake)
        return ThreadSteps(recorded(runner, settings.observation.record_steps), transport, on_failure=wake)

    actor = WorkerActor(transport, settings, lambda: load_runner(settings), thread_steps)
    return actor
