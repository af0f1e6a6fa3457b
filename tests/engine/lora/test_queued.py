"""Adapters in steps that are queued: the tokens of steps one by one, and nothing is dropped that such a step names."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from engine.execution.outputs.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from shared.errors import FatalError
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import GREEDY, Driver
from tests.engine.execution.test_queued_steps import BUNDLED, host_only, occupy
from tests.engine.lora.adapters import save_adapter

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
CASES = [("a", GREEDY), ("b", SAMPLED), ("", SAMPLED), ("b", GREEDY), ("", GREEDY)]
COUNT = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapted")
    model = save_checkpoint(path / "base", "llama-mha", kernels="native")
    save_adapter(model, path / "a", seed=1)
    save_adapter(model, path / "b", seed=2, scale=0.6, target_modules=["q_proj", "embed_tokens", "lm_head"])
    return path


def make(directory: Path) -> tuple[ModelRunner, dict[str, str]]:
    """With the digest of each adapter."""
    runner = make_runner(directory / "base", "native", num_blocks=64, max_num_seqs=8)
    assert runner.adapters is not None
    return runner, {"": ""} | {name: runner.adapters.load(directory / name) for name in ("a", "b")}


def begin(runner: ModelRunner, digests: dict[str, str], cases: list[tuple[str, SamplingParams]]) -> Driver:
    driver = Driver(runner)
    for row, (name, params) in enumerate(cases):
        driver.add(row, random_prompt(9 + 5 * row, seed=row), params, seed=row, adapter=digests[name])
    driver.step({row: live.num_prompt for row, live in driver.live.items()})
    return driver


def launch(runner: ModelRunner, driver: Driver) -> PendingResult:
    plan = driver.plan(dict.fromkeys(driver.live, 1))
    for live in driver.live.values():
        live.num_computed += 1
    return runner.launch(plan)


def test_the_same_tokens_as_one_by_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, digests = make(directory)
    expected = begin(host_only(alone), digests, CASES)
    expected.generate(COUNT + 1)
    runner, _ = make(directory)
    driver = begin(runner, digests, CASES)
    queue = Mock(wraps=runner._model.queue)  # type: ignore[attr-defined]
    monkeypatch.setattr(runner._model, "queue", queue)
    pending: deque[PendingResult] = deque()
    found: list[list[int]] = []
    for _ in range(COUNT):
        pending.append(launch(runner, driver))
        if len(pending) > 2:
            found.append(pending.popleft().finish().sampled_token_ids)
    found += [one.finish().sampled_token_ids for one in pending]
    assert queue.call_count == COUNT
    for row, live in expected.live.items():
        assert [step[row] for step in found] == live.token_ids[live.num_prompt + 1 :][:COUNT], CASES[row]


def test_an_adapter_is_dropped_behind_the_step_that_names_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, digests = make(directory)
    expected = begin(host_only(alone), digests, CASES[:1])
    expected.generate(2)
    token = expected.live[0].token_ids[-1]
    runner, _ = make(directory)
    driver = begin(runner, digests, CASES[:1])
    place, tokens = len(driver.live[0].token_ids), runner._table.tokens
    tokens[0, place] = -1
    seen: list[int] = []
    adapters: Any = runner._model._adapters  # type: ignore[attr-defined]
    drop = adapters.drop

    def seeing(one: int) -> None:
        seen.append(int(tokens[0, place]))
        drop(one)

    monkeypatch.setattr(adapters, "drop", seeing)
    occupied = occupy(make_runner(BUNDLED, "native", dtype="float32", max_num_seqs=1))
    pending = launch(runner, driver)
    assert runner.adapters is not None
    dropping = threading.Thread(target=runner.adapters.keep, args=({digests["b"]},))
    dropping.start()
    dropping.join(20)
    assert seen == [token] == pending.finish().sampled_token_ids and runner.adapters.held == [digests["b"]]
    occupied.finish()


def test_a_plan_that_cannot_be_begun_leaves_adapters_free(directory: Path) -> None:
    runner, digests = make(directory)
    driver = begin(runner, digests, CASES[:1])
    plan = msgspec.structs.replace(driver.plan({0: 1}), num_new_blocks=[5])
    with pytest.raises(FatalError):
        runner.begin(plan)
    assert runner.adapters is not None
    dropping = threading.Thread(target=runner.adapters.keep, args=(set(),), daemon=True)
    dropping.start()
    dropping.join(20)
    assert not dropping.is_alive() and runner.adapters.held == []
