"""The native decoder beside the torch one: the same tokens; and the memory that it holds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.engine import load_runner
from services.worker.runner import ModelRunner
from shared.config import Settings
from shared.sampling import SamplingParams
from tests.kernels.natives import load_build
from tests.modeling.checkpoints import random_prompt
from tests.modeling.driver import Driver

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("babyllama-361", "babyllama-361-draft", "tinystories-656k", "pageant-stories", "pageant-stories-draft")
KERNELS = ("native", "torch")
Formats = tuple[tuple[str, str], ...]
EXACT: list[Formats] = [(), (("kv_cache_dtype", "float32"),), (("kv_cache_dtype", "int8"),)]
# Inputs of linears are rounded: a last bit can move one by a whole step, which soon has moved others.
ROUNDED: list[Formats] = [(("dtype", "bfloat16"),), (("quantization", "int8"),)]


def generate(runner: ModelRunner) -> list[list[int]]:
    """Greedy and seeded continuations of several prompts, side by side and in chunks."""
    driver = Driver(runner)
    for row in range(6):
        params = SamplingParams(temperature=(0.0, 1.0, 0.7)[row % 3], top_p=0.9 if row == 2 else 1.0)
        driver.add(row, random_prompt(5 + 9 * row, seed=row, vocab_size=runner.capacity.vocab_size), params, seed=row)
    driver.generate(30, chunk=24)
    runner.reset()
    return [sequence.output for sequence in driver.live.values()]


@cache
def runner_of(directory: Path, kernels: str, formats: Formats) -> ModelRunner:
    if kernels == "native":
        load_build("native")
    return load_runner(Settings(model=str(directory), kernels=kernels, num_blocks=64, **dict(formats)))  # type: ignore[arg-type]


def directory_of(name: str, request: pytest.FixtureRequest) -> Path:
    bundled = ROOT / "models" / name
    return bundled if bundled.is_dir() else request.getfixturevalue("data_dir") / "models" / name


@pytest.mark.parametrize("formats", EXACT, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_as_torch(name: str, formats: Formats, request: pytest.FixtureRequest) -> None:
    directory = directory_of(name, request)
    native, torchs = (generate(runner_of(directory, kernels, formats)) for kernels in KERNELS)
    assert native == torchs


@pytest.mark.parametrize("formats", ROUNDED, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_as_near_to_the_exact_model_as_torch(name: str, formats: Formats, request: pytest.FixtureRequest) -> None:
    directory = directory_of(name, request)
    exact = prompt_logprobs(runner_of(directory, "torch", (("dtype", "float32"), ("kv_cache_dtype", "float32"))))
    native, torchs = (prompt_logprobs(runner_of(directory, kernels, formats)) for kernels in KERNELS)
    error, usual = (float((found - exact).abs().mean()) for found in (native, torchs))
    assert 0 < error < 1.3 * usual


def prompt_logprobs(runner: ModelRunner) -> Tensor:  # [num_tokens]
    driver = Driver(runner)
    for row in range(6):
        prompt = random_prompt(100, seed=row, vocab_size=runner.capacity.vocab_size)
        driver.add(row, prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.generate(1, chunk=70)
    runner.reset()
    return torch.tensor([one.logprobs[0] for sequence in driver.live.values() for one in sequence.prompt_logprobs])
