"""Executes plans on a device that runs behind the host: one thread launches, another waits for answers and sends them.

A step is launched while the one before it computes, so that the device goes from one to the next without a gap.  All
launches come from one thread and go to one stream: the scheduler's release fence depends on that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from services.worker.blocks.block_desk import BlockDesk
from services.worker.plans.plan_sequencer import PlanSequencer, RowHolder, Work, note_refused
from services.worker.plans.progress import StepWatch
from shared.actor.executor import drop_all
from shared.messages import Holdings, StepPlan, StepResult
from shared.transport import Transport

log = structlog.get_logger()


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult: ...


class Launcher(RowHolder, Protocol):
    """What overlapped steps need of a model runner."""

    def launch(self, plan: StepPlan) -> Pending: ...


class OverlappedSteps:
    """As `services.worker.plans.steps.ThreadSteps`: results are sent in the order of the plans too."""

    def __init__(self, runner: Launcher, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.watch = StepWatch()
        self._runner = runner
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Pending | Holdings | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self._threads = [
            threading.Thread(target=target, args=arguments, name=name, daemon=True)
            for target, arguments, name in ((self._launch, (), "launches"), (self._answer, (transport,), "answers"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        self._work.put(work)

    def move_by(self, desk: BlockDesk) -> None:
        """Blocks on a device do not move: such a worker announces none, and gets no orders."""

    def close(self) -> None:
        """Finish what was launched, drop the rest."""
        drop_all(self._work)
        self._work.put(None)
        for thread in self._threads:
            thread.join(timeout=60)

    def _launch(self) -> None:
        line = PlanSequencer(self._runner)
        try:
            while (work := self._work.get()) is not None:
                turn = line.take(work)
                if isinstance(turn, StepPlan):
                    self.watch.begin(turn)  # a launch may stand still too: in the device's driver, in a full queue
                    self._launched.put(self._runner.launch(turn))
                elif isinstance(turn, Holdings):
                    self._launched.put(turn)
        except BaseException as error:
            self._fail(error)
        finally:
            self._launched.put(None)

    def _answer(self, transport: Transport) -> None:
        outbox = transport.outbox()
        try:
            while (launched := self._launched.get()) is not None:
                outbox.send(transport.scheduler_address, self._finished(launched))
                outbox.flush()
                if not isinstance(launched, Holdings):
                    self.watch.end()
        except BaseException as error:
            self._fail(error)
        finally:
            outbox.close()

    def _finished(self, launched: Pending | Holdings) -> StepResult | Holdings:
        if isinstance(launched, Holdings):
            return launched
        result = launched.finish()
        note_refused(result)
        return result

    def _fail(self, error: BaseException) -> None:
        log.exception("step_failed")
        self.failure = error
        self._on_failure()
