"""Log-probabilities of every family against transformers', computed in chunks through the runner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.messages.steps import TokenLogprobs
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import (
    KERNELS,
    VARIANTS,
    VOCAB,
    make_runner,
    oracle_logprobs,
    random_prompt,
    save_checkpoint,
)
from tests.engine.driver import Driver

ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
MODELS = ("babyllama-361", "babyllama-361-draft", "tinystories-656k")


def dense(positions: Iterable[TokenLogprobs | None]) -> Tensor:  # [num_positions, vocab_size]
    rows = []
    for position in positions:
        assert position is not None
        rows.append(torch.empty(VOCAB).index_put_((torch.tensor(position.token_ids),), torch.tensor(position.logprobs)))
    return torch.stack(rows)


def assert_oracle_agrees(directory: Path, variant: str, kernels: str) -> None:
    """Log-probabilities of prompts in chunks and of outputs within 1e-4 of transformers', and equal greedy tokens."""
    oracle = save_checkpoint(directory, variant, kernels)
    driver = Driver(make_runner(directory, kernels))
    first = driver.add(5, random_prompt(45, seed=1), ALL_LOGPROBS)
    second = driver.add(2, random_prompt(19, seed=2), ALL_LOGPROBS)
    driver.generate(9, chunk=7)
    for sequence in (first, second):
        found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
        wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        assert sequence.output == wanted[sequence.num_prompt - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_are_those_of_transformers(variant: str, kernels: str, tmp_path: Path) -> None:
    assert_oracle_agrees(tmp_path, variant, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "int8"},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["llama-tied", "llama-bias", "deepseek-v2-lite"])
def test_narrower_formats_are_near(variant: str, settings: dict[str, str], kernels: str, tmp_path: Path) -> None:
    if kernels == "native" and settings.get("dtype") == "float16":
        pytest.skip("float16 is torch's alone")
    oracle = save_checkpoint(tmp_path, variant, kernels)
    driver = Driver(make_runner(tmp_path, kernels, **settings))
    sequence = driver.add(0, random_prompt(30, seed=1), ALL_LOGPROBS)
    driver.generate(3, chunk=16)
    found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
    wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
    limit = 0.16 if settings.get("kv_cache_dtype") == "fp8_e5m2" else 0.08  # of two bits behind the point
    assert 1e-5 < (found - wanted).abs().mean() < limit


@pytest.mark.parametrize("kernels", KERNELS)
def test_dynamic_scaling_keeps_a_token_a_function_of_its_history(kernels: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-dynamic", kernels)
    runner = make_runner(tmp_path, kernels, max_model_len=256)
    assert runner.capacity.max_model_len == 256
    driver = Driver(runner)
    whole = driver.add(0, random_prompt(200, seed=1), ALL_LOGPROBS)
    part = driver.add(1, whole.token_ids[:100], ALL_LOGPROBS)
    driver.generate(1)
    assert whole.prompt_logprobs[:99] == part.prompt_logprobs


@pytest.mark.data
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("kernels", "block_size"), [("torch", 8), ("torch", 32), ("native", 16), ("native", 32), ("native", 64)]
)
def test_greedy_continuations_of_trained_models(name: str, kernels: str, block_size: int, data_dir: Path) -> None:
    directory = data_dir / "models" / name
    expected = json.loads((directory / "expected_greedy.json").read_text(encoding="utf-8"))
    prompt, wanted = expected["prompt_ids"], expected["greedy_ids_transformers_fp64"]
    driver = Driver(make_runner(directory, kernels, block_size=block_size, num_blocks=512 // block_size))
    sequence = driver.add(0, prompt)
    driver.generate(len(wanted) - len(prompt), chunk=5)
    assert sequence.token_ids == wanted
