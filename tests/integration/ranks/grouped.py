"""Engines whose workers are groups of processes, driven as `services.worker` drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

from engine.execution.runner import ModelRunner
from services.scheduler.invariants import check
from services.scheduler.state.policy import Policy
from services.worker.plans.pipelined import PipelinedComputation
from shared.config import Settings
from shared.messages import StepResult
from tests.engine.ranks import linked, ranked, ranked_stages, staged
from tests.integration.engine import STEP_SECONDS, Engine

Grouped = Callable[..., AbstractContextManager[tuple[ModelRunner, Any]]]  # (settings, processes, has_windows)


@contextmanager
def over_tcp(settings: Settings, ranks: int, has_windows: bool = True) -> Iterator[tuple[ModelRunner, Any]]:
    """Ranks that share no memory, as if of several hosts."""
    with linked(settings, ranks, has_windows) as (runner, group, _):
        yield runner, group


class GroupedEngine(Engine):
    """`grouped`: `ranked`, or `staged` and `ranked_stages` for pipelines, which have a second plan before the first
    one's result.

    `close` ends the processes, `close_all` those of all engines that there are.
    """

    _open: ClassVar[list[GroupedEngine]] = []

    def __init__(
        self, policy: Policy | None = None, *, grouped: Grouped = ranked, processes: int = 2, **options: Any
    ) -> None:
        self._grouped = grouped
        self._processes = processes
        self._groups: dict[str, ExitStack] = {}
        self._steps: dict[str, PipelinedComputation[Any]] = {}
        self.most_begun = 0  # parts of plans in a pipeline at a time
        self._open.append(self)
        super().__init__(policy, **options)

    def __enter__(self) -> GroupedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def close_all(cls) -> None:
        while cls._open:
            cls._open[-1].close()

    def close(self) -> None:
        self._open.remove(self)
        for name in list(self._groups):
            self._groups.pop(name).close()

    def lose(self, name: str) -> None:
        super().lose(name)
        self._steps.pop(name, None)
        self._groups.pop(name).close()

    def _load(self, name: str, settings: Settings, has_windows: bool) -> ModelRunner:
        self._groups[name] = stack = ExitStack()
        runner, _ = stack.enter_context(self._grouped(settings, self._processes, has_windows))
        if self._grouped in (staged, ranked_stages):
            self._steps[name] = PipelinedComputation(runner, self._processes)
        return runner

    def step(self) -> bool:
        if not self._steps:
            return super().step()
        turns = [self._turn(name, steps) for name, steps in list(self._steps.items())]
        check(self.core)
        self._collect()
        return any(turns)

    def _turn(self, name: str, steps: PipelinedComputation[Any]) -> bool:
        for plan in self._plans(name):
            steps.apply(plan)
            self.plans.append((name, plan))
        results = [] if steps.is_idle else steps.turn()
        for result in results:
            assert isinstance(result, StepResult)
            self._linger()
            self.now += STEP_SECONDS
            self.core.apply(name, result, self.now)
        self.most_begun = max(self.most_begun, 1 + steps.num_begun)
        return bool(results) or not steps.is_idle
