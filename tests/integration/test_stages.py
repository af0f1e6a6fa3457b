"""A pipeline under the scheduler's core, two plans in flight: forks, preemptions, windows, drafts change no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.invariants import check
from services.scheduler.state.policy import Policy
from services.worker.pipelined import PipelinedComputation
from services.worker.progress import StepWatch
from shared.messages import StepResult
from tests.engine.checkpoints import save_checkpoint
from tests.engine.ranks import staged
from tests.integration.engine import MODEL, STEP_SECONDS, Engine, ask, token_ids
from tests.integration.test_ranks import FORMATS, asks


class StagedEngine(Engine):
    """Whose worker is a pipeline, which has a second plan before the first one's result."""

    def __init__(self, stack: ExitStack, stages: int, **options: Any) -> None:
        self._stack = stack
        self._stages = stages
        self.most_begun = 0
        super().__init__(**options)

    def join(self, name: str, **settings: Any) -> None:
        self._epoch += 1
        runner, _ = self._stack.enter_context(staged(self.settings.replace(**settings), self._stages))
        self.runners[name] = runner
        self._steps = PipelinedComputation(runner, StepWatch(), self._stages)
        self.core.add_worker(name, self._epoch, runner.capacity)

    def step(self) -> bool:
        (name,) = self.runners
        for plan in self._plans(name):
            self._steps.apply(plan)
            self.plans.append((name, plan))
        results = [] if self._steps.is_idle else self._steps.turn()
        for result in results:
            assert isinstance(result, StepResult)
            self._linger()
            self.now += STEP_SECONDS
            self.core.apply(name, result, self.now)
        self.most_begun = max(self.most_begun, 1 + self._steps.num_begun)
        check(self.core)
        self._collect()
        return bool(results) or not self._steps.is_idle


@contextmanager
def pipelines(stages: int, **options: Any) -> Iterator[StagedEngine]:
    with ExitStack() as stack:
        yield StagedEngine(stack, stages, **FORMATS, **options)


@pytest.mark.parametrize(("kind", "stages"), [("plain", 2), ("plain", 3), ("gemma3", 2)])
def test_forks_preemptions_and_windows(kind: str, stages: int, tmp_path: Path) -> None:
    model: dict[str, Any] = {"model": str(MODEL)}
    if kind != "plain":
        changes = {"vocab_size": 4096, "max_position_embeddings": 512, "num_key_value_heads": 2}
        save_checkpoint(tmp_path, kind, "native", changes)
        model = {"model": str(tmp_path), "has_windows": True}
    wanted = Engine(**FORMATS, **model).generate(asks(4000))
    policy = Policy(max_num_batched_tokens=64)
    with pipelines(stages, policy=policy, num_blocks=24, **model) as engine:
        assert token_ids(engine.generate(asks(4000))) == token_ids(wanted)
        assert engine.counters.num_preemptions and any(plan.block_copies for _, plan in engine.plans)
        assert engine.most_begun == stages


def test_drafts_are_verified_by_the_last_stage() -> None:
    repeating = [ask([5 + n, 90, 7, 300 + n] * 6, seed=n, max_tokens=40, temperature=0.3 * n) for n in range(3)]
    wanted = Engine(**FORMATS).generate(repeating)
    with pipelines(2, policy=Policy(num_draft_tokens=4), draft="ngram") as engine:
        engine.join_draft("draft0")
        assert token_ids(engine.generate(repeating)) == token_ids(wanted)
        assert engine.counters.num_accepted_tokens > 0
