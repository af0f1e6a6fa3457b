"""Executes plans in order, in the caller's thread or in one of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from services.worker.plan_sequencer import PlanSequencer, RowHolder, Work, note_refused
from services.worker.progress import StepWatch
from shared.messages import Holdings, StepPlan, StepResult
from shared.transport import Transport

log = structlog.get_logger()


class StepRunner(RowHolder, Protocol):
    """What steps need of a model runner."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Steps(Protocol):
    """Where plans go.  `failure` is what ended the stepping, for good."""

    failure: BaseException | None
    watch: StepWatch

    def submit(self, work: Work) -> None: ...

    def close(self) -> None: ...


class StepExecutor:
    """Runs the plans that are due, and returns their results."""

    def __init__(self, runner: StepRunner, watch: StepWatch) -> None:
        self._runner = runner
        self._watch = watch
        self._sequencer = PlanSequencer(runner)

    def run(self, work: Work) -> StepResult | Holdings | None:
        turn = self._sequencer.take(work)
        if not isinstance(turn, StepPlan):
            return turn
        self._watch.begin(turn)
        result = self._runner.run(turn)
        self._watch.end()
        note_refused(result)
        return result


class InlineSteps:
    """Runs each plan where it is submitted: for tests in one thread."""

    def __init__(self, runner: StepRunner, transport: Transport) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._executor = StepExecutor(runner, self.watch)
        self._outbox = transport.outbox()
        self._scheduler = transport.scheduler_address

    def submit(self, work: Work) -> None:
        if answer := self._executor.run(work):
            self._outbox.send(self._scheduler, answer)
            self._outbox.flush()

    def close(self) -> None:
        self._outbox.close()


class ThreadSteps:
    """Runs plans in a thread with a socket of its own, so that the event loop never waits for a forward pass.

    One thread and one stream: the scheduler's release fence rests on that.
    """

    def __init__(self, runner: StepRunner, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._loop, args=(runner, transport), name="steps", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def close(self) -> None:
        """Finish the plan that is running, drop the rest."""
        while not self._work.empty():
            self._work.get_nowait()
        self._work.put(None)
        self._thread.join(timeout=60)

    def _loop(self, runner: StepRunner, transport: Transport) -> None:
        outbox = transport.outbox()
        executor = StepExecutor(runner, self.watch)
        try:
            while (work := self._work.get()) is not None:
                if answer := executor.run(work):
                    outbox.send(transport.scheduler_address, answer)
                    outbox.flush()
        except BaseException as error:
            self.failure = error
            log.exception("step_failed")
            self._on_failure()
        finally:
            outbox.close()
