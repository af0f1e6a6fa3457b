"""A token is a pure function of its history: bit for bit the same whatever is computed beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from engine.execution.runner import ModelRunner
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import KERNELS, make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver, Live

PARAMS = SamplingParams(temperature=0.9, top_p=0.95, logprobs=5, prompt_logprobs=0)
NUM_TOKENS = 24


FORMATS: dict[str, dict[str, Any]] = {
    "llama-mha": {},
    "mistral-window": {"kv_cache_dtype": "int8"},
    "qwen3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
    "qwen2": {"quantization": "int8"},
    "qwen2-moe": {"kv_cache_dtype": "fp8_e4m3"},
    "llama-tied": {"quantization": "int4", "quantization_group": 32},
    "mixtral": {"quantization": "int4", "quantization_head": "none", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=itertools.product(KERNELS, FORMATS), ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    kernels, variant = request.param
    directory: Path = tmp_path_factory.mktemp(variant)
    save_checkpoint(directory, variant, kernels)
    # Torch's threads wait long for each other beside those of other tests; one model has two all the same.
    num_threads = 1 if kernels == "torch" and variant != "qwen2" else 2
    return make_runner(directory, kernels, block_size=16, num_blocks=320, num_threads=num_threads, **FORMATS[variant])


@pytest.fixture(autouse=True)
def clean(runner: ModelRunner) -> Iterator[None]:
    yield
    runner.reset()


@lru_cache(maxsize=1)  # of the runner that is under test
def run_alone(runner: ModelRunner) -> Live:
    runner.reset()
    driver = Driver(runner)
    sequence = driver.add(0, random_prompt(37, seed=1), PARAMS, seed=99)
    driver.generate(NUM_TOKENS)
    runner.reset()
    return sequence


def assert_same(found: Live, wanted: Live) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.logprobs == wanted.logprobs
    assert found.prompt_logprobs == wanted.prompt_logprobs


def test_among_forty_others(runner: ModelRunner) -> None:
    wanted = run_alone(runner)
    driver = Driver(runner, order=3)
    for row in range(40):
        driver.add(row, random_prompt(3 + row, seed=row + 10), SamplingParams(temperature=row % 3 / 2, top_k=row % 5))
    driver.generate(4)
    sequence = driver.add(47, random_prompt(37, seed=1), PARAMS, seed=99)
    driver.generate(NUM_TOKENS)
    assert_same(sequence, wanted)


@pytest.mark.parametrize("chunk", [1, 5, 16, 30])
def test_prompt_in_chunks(runner: ModelRunner, chunk: int) -> None:
    wanted = run_alone(runner)
    driver = Driver(runner, order=4)
    sequence = driver.add(9, random_prompt(37, seed=1), PARAMS, seed=99)
    driver.generate(NUM_TOKENS, chunk=chunk)
    assert_same(sequence, wanted)


def test_recomputed_after_preemption(runner: ModelRunner) -> None:
    wanted = run_alone(runner)
    driver = Driver(runner, order=5)
    sequence = driver.add(9, random_prompt(37, seed=1), PARAMS, seed=99)
    driver.add(10, random_prompt(21, seed=2))
    driver.generate(11)
    driver.preempt(9)
    driver.step({10: 1})
    sequence.prompt_logprobs.clear()
    driver.generate(NUM_TOKENS)
    assert_same(sequence, wanted)


def test_on_blocks_that_another_sequence_filled(runner: ModelRunner) -> None:
    """A prefix hit: the second sequence starts with the first one's full blocks as computed."""
    wanted = run_alone(runner)
    driver = Driver(runner, order=6)
    first = driver.add(0, random_prompt(37, seed=1))
    driver.generate(2)
    sequence = driver.add(1, random_prompt(37, seed=1), PARAMS, seed=99)
    sequence.blocks, sequence.num_computed = first.blocks[:2], 32
    driver.generate(NUM_TOKENS)
    assert sequence.token_ids == wanted.token_ids
    assert sequence.logprobs == wanted.logprobs
    assert sequence.prompt_logprobs == wanted.prompt_logprobs[32:]


def test_on_a_copied_block(runner: ModelRunner) -> None:
    """A partial block shared by two sequences is copied before one of them writes on."""
    wanted = run_alone(runner)
    driver = Driver(runner, order=7)
    first = driver.add(0, random_prompt(37, seed=1))
    driver.generate(2)
    sequence = driver.add(1, random_prompt(37, seed=1), PARAMS, seed=99)
    copy = driver.free.pop()
    sequence.blocks, sequence.num_computed = [*first.blocks[:2], copy], 36
    result = runner.run(driver.plan({1: 1}, copies=[(first.blocks[2], copy)]))
    assert result.sampled_token_ids == wanted.output[:1]


def test_causality(runner: ModelRunner) -> None:
    """What comes later leaves what came before as it was, bit for bit."""
    driver = Driver(runner)
    prompt = random_prompt(40, seed=1)
    first = driver.add(0, prompt, PARAMS)
    second = driver.add(1, [*prompt[:30], *random_prompt(10, seed=2)], PARAMS)
    driver.generate(1)
    assert first.prompt_logprobs[:29] == second.prompt_logprobs[:29]
    assert first.prompt_logprobs[30:] != second.prompt_logprobs[30:]
