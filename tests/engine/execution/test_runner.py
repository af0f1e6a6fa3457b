"""What a plan may and may not say, and what comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.loading.load import load_runner
from engine.modeling.batch import StepBatch
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from shared.messages.steps import Refusal, RefusedRow, StepResult
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path, "llama-tied")
    return path


@pytest.fixture
def driver(directory: Path) -> Driver:
    return Driver(make_runner(directory))


def reasons(result: StepResult) -> dict[int, Refusal]:
    """By entry, of those that were refused."""
    return {one.entry: one.reason for one in result.refused_rows}


def test_capacity(directory: Path) -> None:
    capacity = make_runner(directory, served_model_name="small", max_model_len=100, max_num_seqs=5).capacity
    assert (capacity.num_blocks, capacity.block_size, capacity.max_num_seqs) == (256, 8, 5)
    assert (capacity.max_model_len, capacity.vocab_size, capacity.model) == (100, 211, "small")
    assert (capacity.dtype, capacity.device) == ("float32", "cpu")


def test_only_what_reaches_the_end_samples(driver: Driver) -> None:
    driver.add(0, random_prompt(20, seed=1))
    driver.add(1, random_prompt(10, seed=2))
    result = driver.step({0: 12, 1: 10})
    assert result.num_sampled == [0, 1]
    assert len(result.sampled_token_ids) == 1
    assert result.logprobs == []
    assert result.device_time > 0


def test_head_computes_only_rows_that_sample(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    model = driver.runner._model
    honest = model.logits

    def logits(hidden: Tensor, *more: Any) -> Tensor:
        seen.append(len(hidden))
        return honest(hidden, *more)

    monkeypatch.setattr(model, "logits", logits)
    for row in range(3):
        driver.add(row, random_prompt(20, seed=row), SamplingParams(temperature=1.0))
    driver.step({0: 20, 1: 20, 2: 7})
    driver.step({2: 7})
    driver.step({0: 1, 1: 1, 2: 6})
    assert seen == [2, 3]


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_tokens": 0}, True),
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {5: 1.0}}, False),
        ({"min_tokens": 2}, False),
    ],
)
def test_logits_are_made_only_where_somebody_needs_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], plain: bool
) -> None:
    seen: list[str] = []
    model = driver.runner._model
    for name in ("logits", "greedy"):
        monkeypatch.setattr(model, name, spy(getattr(model, name), name, seen))
    driver.add(0, random_prompt(20, seed=1))
    driver.add(1, random_prompt(20, seed=2), SamplingParams(**({"temperature": 0.0} | params)))
    driver.step({0: 20, 1: 20})
    assert seen[0] == ("greedy" if plain else "logits")


def spy(honest: Callable[..., Tensor], name: str, seen: list[str]) -> Callable[..., Tensor]:
    def called(hidden: Tensor, *more: Any) -> Tensor:
        seen.append(name)
        return honest(hidden, *more)

    return called


def test_only_wanted_hidden_states_come_back(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a row that samples, none of an unfinished chunk, all of a chunk whose prompt is scored."""
    seen: list[tuple[list[int], int]] = []
    model = driver.runner._model
    honest = model.forward

    def forward(batch: StepBatch) -> Tensor:
        hidden = honest(batch)
        seen.append((batch.wanted.tolist(), len(hidden)))
        return hidden

    monkeypatch.setattr(model, "forward", forward)
    driver.add(0, random_prompt(10, seed=1))
    driver.add(1, random_prompt(10, seed=2))
    driver.add(2, random_prompt(10, seed=3), SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.step({0: 10, 1: 6, 2: 4})
    driver.step({1: 4, 2: 6})
    driver.step({0: 1, 2: 1})
    assert seen == [([1, 0, 4], 5), ([1, 6], 7), ([1, 1], 2)]


def test_an_empty_plan(driver: Driver) -> None:
    result = driver.step({})
    assert (result.num_sampled, result.sampled_token_ids, result.step_id) == ([], [], 1)


def test_a_plan_made_before_its_tokens_are_known(directory: Path) -> None:
    """Two steps in flight: the second plan counts on the first one's token without having seen it."""
    wanted = Driver(make_runner(directory))
    sequence = wanted.add(0, random_prompt(13, seed=1))
    wanted.generate(4)
    driver = Driver(make_runner(directory))
    ahead = driver.add(0, random_prompt(13, seed=1))
    plans = [driver.plan({0: 13})]
    for _ in range(3):
        ahead.num_computed += plans[-1].num_scheduled_tokens[0]
        plans.append(driver.plan({0: 1}))
    sampled = [driver.runner.run(plan).sampled_token_ids for plan in plans]
    assert [token for step in sampled for token in step] == sequence.output


def test_a_row_is_used_again(driver: Driver) -> None:
    driver.add(3, random_prompt(40, seed=1), SamplingParams(temperature=1.0, repetition_penalty=1.5))
    driver.generate(3)
    driver.finish(3)
    again = driver.add(3, random_prompt(9, seed=2))
    driver.generate(5)
    fresh = Driver(driver.runner)
    other = fresh.add(4, random_prompt(9, seed=2))
    fresh.generate(5)
    assert again.output == other.output


def test_tables_after_many_random_steps(directory: Path) -> None:
    runner = make_runner(directory)
    driver = Driver(runner)
    generator = random.Random(8)
    for step in range(150):
        row = generator.randrange(12)
        if row in driver.live and generator.random() < 0.15:
            driver.finish(row)
        elif row not in driver.live:
            driver.add(row, random_prompt(generator.randrange(1, 60), seed=step))
        pending = {row: len(one.token_ids) - one.num_computed for row, one in driver.live.items()}
        chosen = [row for row, count in pending.items() if count and len(driver.live[row].token_ids) < 100]
        driver.step({row: generator.randint(1, pending[row]) for row in chosen})
        for row, sequence in driver.live.items():
            if sequence.admitted:
                table = runner._table
                assert table.block_tables[row, : table.num_blocks[row]].tolist() == sequence.blocks
                assert table.tokens[row, : table.num_tokens[row]].tolist() == sequence.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [64]}, "rows"),
        ({"rows": [-1]}, "rows"),
        ({"new_block_ids": [3]}, "1 new block ids for counts that sum to 0"),
        ({"new_block_ids": [256], "num_new_blocks": [1]}, "block outside the pool of 256"),
        ({"block_copies": [(0, 256)]}, "copies a block outside the pool"),
        ({"released_rows": [70]}, "row 70"),
    ],
)
def test_a_plan_that_no_scheduler_makes(driver: Driver, change: dict[str, Any], message: str) -> None:
    driver.add(0, random_prompt(10, seed=1))
    driver.step({0: 10})
    plan = msgspec.structs.replace(driver.plan({0: 1}), **change)
    with pytest.raises(FatalError, match=message):
        driver.runner.run(plan)


@pytest.mark.parametrize(
    "change",
    [
        {"num_computed_tokens": [11, 10]},
        {"num_computed_tokens": [9, 10]},
        {"num_scheduled_tokens": [2, 1]},
        {"num_scheduled_tokens": [0, 1]},
        {"rows": [2, 1]},
    ],
)
def test_a_row_out_of_step_is_refused_alone(driver: Driver, change: dict[str, Any]) -> None:
    for row in (0, 1):
        driver.add(row, random_prompt(10, seed=row))
    driver.step({0: 10, 1: 10})
    plan = driver.plan({0: 1, 1: 1})
    result = driver.runner.run(msgspec.structs.replace(plan, **change))
    assert reasons(result) == {0: Refusal.NOT_IN_STEP}
    assert result.num_sampled == [0, 1]
    alone = Driver(driver.runner, order=1)
    driver.runner.reset()
    sequence = alone.add(1, random_prompt(10, seed=1))
    alone.generate(2)
    assert result.sampled_token_ids == sequence.output[1:]


def test_a_row_whose_block_has_become_another_s_is_refused(driver: Driver) -> None:
    """Block 0 of row 0 is given to row 1 in its next life: row 0 computes no more, and row 1 is not disturbed."""
    driver.add(0, random_prompt(10, seed=1))
    first = driver.plan({0: 10})
    driver.runner.run(msgspec.structs.replace(first, new_block_generations=[1, 1]))
    driver.live[0].num_computed = 10
    driver.add(1, random_prompt(5, seed=2))
    second = driver.plan({0: 1, 1: 5})
    stolen = msgspec.structs.replace(second, new_block_ids=first.new_block_ids[:1], new_block_generations=[2])
    result = driver.runner.run(stolen)
    unwritten = [(first.new_block_ids[1], 1)]
    assert result.refused_rows == [RefusedRow(0, Refusal.STALE_BLOCK, first.new_block_ids[0], 1, 2, unwritten)]
    assert result.num_sampled == [0, 1]
    third = msgspec.structs.replace(driver.plan({1: 1}), num_computed_tokens=[5], released_rows=[0])
    assert driver.runner.run(third).refused_rows == []
    assert driver.runner.holdings()[0] == [1]


def test_the_copy_for_a_refused_row_is_not_made(driver: Driver) -> None:
    """Its destination may be what another has written since."""
    driver.add(0, random_prompt(8, seed=1))
    driver.runner.run(msgspec.structs.replace(driver.plan({0: 8}), new_block_generations=[3]))
    held = driver.live[0].blocks[0]
    pool = driver.runner._pool
    before = [part[held].clone() for part in pool.tensors]
    driver.add(1, random_prompt(8, seed=2))
    plan = msgspec.structs.replace(
        driver.plan({1: 8}, copies=[(5 if held != 5 else 6, held)]), new_block_ids=[held], new_block_generations=[2]
    )
    assert reasons(driver.runner.run(plan)) == {0: Refusal.STALE_BLOCK}
    assert all(torch.equal(part[held], old) for part, old in zip(pool.tensors, before, strict=True))


def test_a_row_planned_twice(driver: Driver) -> None:
    driver.add(0, random_prompt(10, seed=1))
    driver.step({0: 10})
    plan = msgspec.structs.replace(
        driver.plan({0: 1}),
        rows=[0, 0],
        num_computed_tokens=[10, 10],
        num_scheduled_tokens=[1, 1],
        num_new_blocks=[0, 0],
    )
    with pytest.raises(FatalError, match="not distinct rows"):
        driver.runner.run(plan)


def test_too_few_blocks(driver: Driver) -> None:
    driver.add(0, random_prompt(20, seed=1))
    plan = driver.plan({0: 20})
    short = msgspec.structs.replace(plan, num_new_blocks=[2], new_block_ids=plan.new_block_ids[:2])
    assert reasons(driver.runner.run(short)) == {0: Refusal.NOT_IN_STEP}


@pytest.mark.parametrize("prompt", [[], [5] * 129, [211], [-1]])
def test_an_admission_that_cannot_be(driver: Driver, prompt: list[int]) -> None:
    driver.add(0, prompt)
    with pytest.raises(FatalError, match="row 0 is admitted with"):
        driver.runner.run(driver.plan({0: 1}))


def test_the_last_position(directory: Path) -> None:
    driver = Driver(make_runner(directory))
    sequence = driver.add(0, random_prompt(126, seed=1))
    driver.generate(3)
    assert len(sequence.token_ids) == driver.runner.capacity.max_model_len + 1
    with pytest.raises(FatalError, match="row 0 is given 17 blocks, more than 16"):
        driver.step({0: 1})


def test_reset_forgets(driver: Driver) -> None:
    driver.add(0, random_prompt(10, seed=1))
    driver.step({0: 10})
    driver.runner.reset()
    assert reasons(driver.step({0: 1})) == {0: Refusal.NOT_IN_STEP}


def test_prompt_logprobs_cover_the_chunk(driver: Driver) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    driver.add(0, random_prompt(10, seed=1))
    sequence = driver.add(1, random_prompt(10, seed=2), params)
    found = [driver.step({0: 1, 1: count}).prompt_logprobs for count in (4, 1, 5)]
    assert [[len(one) for one in step.values()] for step in found] == [[4], [1], [4]]
    assert [list(step) for step in found] == [[1], [1], [1]]
    assert [position.token_ids[0] for position in sequence.prompt_logprobs] == sequence.token_ids[1:10]
    assert all(len(position.token_ids) == 3 for position in sequence.prompt_logprobs)
    assert driver.step({1: 1}).prompt_logprobs == {}


def test_logprobs_only_of_those_who_asked(driver: Driver) -> None:
    driver.add(0, random_prompt(10, seed=1))
    driver.add(1, random_prompt(10, seed=2), SamplingParams(temperature=0.0, logprobs=0))
    result = driver.step({0: 10, 1: 10})
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.logprobs[1].token_ids == result.sampled_token_ids[1:]
    assert result.logprobs[1].rank == 1


def test_min_tokens_holds_the_end_back(driver: Driver) -> None:
    probe = driver.add(0, random_prompt(10, seed=1))
    driver.generate(1)
    end = probe.output[0]
    held = driver.add(1, random_prompt(10, seed=1), SamplingParams(temperature=0.0, min_tokens=3), eos_token_ids=[end])
    ignoring = driver.add(
        2,
        random_prompt(10, seed=1),
        SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True),
        eos_token_ids=[end],
    )
    driver.generate(3)
    assert end not in held.output
    assert ignoring.output == probe.output


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_too_long_for_the_model(directory: Path, load_format: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 129, more than the model's 128 positions"):
        make_runner(directory, max_model_len=129, load_format=load_format)


def test_length_shrinks_to_the_memory(directory: Path) -> None:
    assert make_runner(directory, num_blocks=5).capacity.max_model_len == 40
    with pytest.raises(ConfigError, match="5 blocks, but one sequence of 100 tokens needs 13"):
        make_runner(directory, num_blocks=5, max_model_len=100)


def test_blocks_from_memory(directory: Path) -> None:
    block = 2 * 3 * 8 * 1 * 12 * 4
    settings = Settings.of(model=str(directory), block_size=8, kv_cache_memory=1000 * block + 1)
    assert load_runner(settings).capacity.num_blocks == 1000
