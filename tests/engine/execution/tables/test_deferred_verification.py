"""Rows whose drafts a device verifies: the host counts their tokens when a plan names them, and never sooner."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.runner import ModelRunner
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver

PROMPT = 10


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    save_checkpoint(tmp_path, "llama-tied")
    return make_runner(tmp_path)


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    """Three rows have their first token; two drafts of the first two, which are wrong, are being verified."""
    made = Driver(runner)
    for row in range(3):
        made.add(row, random_prompt(PROMPT, seed=row))
    made.step(dict.fromkeys(range(3), PROMPT))
    made.step({0: 3, 1: 3, 2: 1}, {0: [3, 3], 1: [4, 4]})
    return made


def lengths(driver: Driver) -> list[int]:
    counts: list[int] = driver.runner._table.num_tokens[:3].tolist()
    return counts


def test_rows_are_settled_as_they_are_named(driver: Driver) -> None:
    """One without drafts is so at once."""
    assert lengths(driver) == [PROMPT + 1, PROMPT + 1, PROMPT + 2]
    driver.step({1: 1})
    assert lengths(driver) == [PROMPT + 1, PROMPT + 3, PROMPT + 2]
    driver.step({2: 1})
    assert lengths(driver)[0] == PROMPT + 1
    driver.step({0: 1})
    assert lengths(driver) == [PROMPT + 3, PROMPT + 3, PROMPT + 3]
    assert not driver.runner._deferred._steps


def test_launching_asks_no_outcome_of_its_own_step(driver: Driver) -> None:
    plan = driver.plan({0: 3, 1: 3, 2: 1}, drafts={0: [5, 5], 1: [6, 6]})
    driver.runner._deferred.settle([0, 1, 2])
    with patch.object(SampledTokens, "yielded", property(lambda self: pytest.fail("somebody waits"))):
        answer = driver.runner.launch(plan)
    assert answer.finish().num_sampled[2] == 1


@pytest.mark.parametrize("again", [False, True])
def test_what_is_released_is_never_settled(driver: Driver, again: bool) -> None:
    """Nor if the row is another sequence's by then."""
    driver.finish(0)
    if again:
        driver.add(0, random_prompt(4, seed=9))
    driver.step({0: 4, 1: 1} if again else {1: 1})
    assert lengths(driver)[0] == (5 if again else 0)
    assert not driver.runner._deferred._steps


def test_a_new_epoch_forgets_them(driver: Driver) -> None:
    driver.runner.reset()
    assert not driver.runner._deferred._steps
    again = Driver(driver.runner)
    again.add(0, random_prompt(4, seed=9))
    again.step({0: 4})
    assert lengths(again)[0] == 5


def test_one_draft_is_settled_as_several_are(runner: ModelRunner) -> None:
    driver, prompt = Driver(runner), random_prompt(PROMPT, seed=5)
    alone = driver.add(0, prompt)
    driver.step({0: PROMPT})
    driver.step({0: 1})
    following = alone.output[1]
    driver.add(1, prompt)
    driver.step({1: PROMPT})
    driver.step({1: 2}, {1: [following]})
    assert lengths(driver)[1] == PROMPT + 1 and len(driver.runner._deferred._steps) == 1
    driver.step({1: 1})
    assert lengths(driver)[1] == PROMPT + 1 + 2 + 1
