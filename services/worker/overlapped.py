"""Executes plans on a device that runs behind the host: one thread launches, another waits for answers and sends them.

A step is launched while the one before it computes, so that the device goes from one to the next without a gap.  All
launches come from one thread and go to one stream: the scheduler's release fence rests on that.
"""

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


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult: ...


class Launcher(Protocol):
    """What overlapped steps need of a model runner."""

    def reset(self) -> None: ...

    def launch(self, plan: StepPlan) -> Pending: ...


class OverlappedSteps:
    """As `services.worker.steps.ThreadSteps`, with results in the order of the plans all the same."""

    def __init__(self, runner: Launcher, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._runner = runner
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[tuple[StepPlan, Pending] | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._threads = [
            threading.Thread(target=target, args=arguments, name=name, daemon=True)
            for target, arguments, name in ((self._launch, (), "launches"), (self._answer, (transport,), "answers"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def close(self) -> None:
        """Finish what was launched, drop the rest."""
        while not self._plans.empty():
            self._plans.get_nowait()
        self._plans.put(None)
        for thread in self._threads:
            thread.join(timeout=60)

    def _launch(self) -> None:
        epoch = 0
        try:
            while (plan := self._plans.get()) is not None:
                if plan.epoch > epoch:
                    self._runner.reset()
                    epoch = plan.epoch
                if plan.epoch == epoch:
                    self._launched.put((plan, self._runner.launch(plan)))
        except BaseException as error:
            self._fail(error)
        finally:
            self._launched.put(None)

    def _answer(self, transport: Transport) -> None:
        outbox = transport.outbox()
        try:
            while (launched := self._launched.get()) is not None:
                plan, pending = launched
                self.watch.begin(plan)
                outbox.send(transport.scheduler_address, pending.finish())
                outbox.flush()
                self.watch.end()
        except BaseException as error:
            self._fail(error)
        finally:
            outbox.close()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        log.exception("step_failed")
        self._on_failure()
