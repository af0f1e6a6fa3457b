"""Executes plans in order, in the caller's thread or in one of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from services.worker.progress import StepWatch
from shared.messages import StepPlan, StepResult
from shared.transport import Transport

log = structlog.get_logger()


class Runner(Protocol):
    """What steps need of a model runner."""

    def reset(self) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class Steps(Protocol):
    """Where plans go.  `failure` is what ended the stepping, for good."""

    failure: BaseException | None
    watch: StepWatch

    def submit(self, plan: StepPlan) -> None: ...

    def close(self) -> None: ...


class EpochFence:
    """Lets plans through in order of epoch: an older life's are dropped, a newer one's empty the rows first."""

    def __init__(self, runner: Runner, watch: StepWatch) -> None:
        self._runner = runner
        self._watch = watch
        self._epoch = 0

    def run(self, plan: StepPlan) -> StepResult | None:
        if plan.epoch < self._epoch:
            return None
        if plan.epoch > self._epoch:
            self._runner.reset()
            self._epoch = plan.epoch
        self._watch.begin(plan)
        result = self._runner.run(plan)
        self._watch.end()
        return result


class InlineSteps:
    """Runs each plan where it is submitted: for tests in one thread."""

    def __init__(self, runner: Runner, transport: Transport) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._fence = EpochFence(runner, self.watch)
        self._outbox = transport.outbox()
        self._scheduler = transport.scheduler_address

    def submit(self, plan: StepPlan) -> None:
        if result := self._fence.run(plan):
            self._outbox.send(self._scheduler, result)
            self._outbox.flush()

    def close(self) -> None:
        self._outbox.close()


class ThreadSteps:
    """Runs plans in a thread with a socket of its own, so that the event loop never waits for a forward pass.

    One thread and one stream: the scheduler's release fence rests on that.
    """

    def __init__(self, runner: Runner, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._loop, args=(runner, transport), name="steps", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def close(self) -> None:
        """Finish the plan that is running, drop the rest."""
        while not self._plans.empty():
            self._plans.get_nowait()
        self._plans.put(None)
        self._thread.join(timeout=60)

    def _loop(self, runner: Runner, transport: Transport) -> None:
        outbox = transport.outbox()
        fence = EpochFence(runner, self.watch)
        try:
            while (plan := self._plans.get()) is not None:
                if result := fence.run(plan):
                    outbox.send(transport.scheduler_address, result)
                    outbox.flush()
        except BaseException as error:
            self.failure = error
            log.exception("step_failed")
            self._on_failure()
        finally:
            outbox.close()
