"""The native decoder beside the torch one: the same tokens; and the memory that it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.description.reading import parse_config, tensors_of
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.weights.plain import DummyWeights
from shared.config import Settings
from shared.errors import ConfigError
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt
from tests.engine.driver import Driver
from tests.kernels.cpu.natives import load_build

ROOT = Path(__file__).resolve().parents[3]
MODELS = ("babyllama-361", "babyllama-361-draft", "tinystories-656k", "pageant-stories", "pageant-stories-draft")
KERNELS = ("native", "torch")
Formats = tuple[tuple[str, str], ...]
FLOAT32: Formats = (("dtype", "float32"),)  # said, since `auto` is what a processor is fastest in
EXACT: list[Formats] = [FLOAT32, *((*FLOAT32, ("kv_cache_dtype", stored)) for stored in ("float32", "int8"))]
# Inputs of linears are rounded: a last bit can move one by a whole step, which soon has moved others.
ROUNDED: list[Formats] = [(("dtype", "bfloat16"),), (("quantization", "int8"),), (("quantization", "int4"),)]


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
    return load_runner(Settings.of(model=str(directory), kernels=kernels, num_blocks=64, **dict(formats)))


def directory_of(name: str, request: pytest.FixtureRequest) -> Path:
    bundled = ROOT / "models" / name
    return bundled if bundled.is_dir() else request.getfixturevalue("data_dir") / "models" / name


@pytest.mark.parametrize("formats", EXACT, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_as_torch(name: str, formats: Formats, request: pytest.FixtureRequest) -> None:
    directory = directory_of(name, request)
    native, torchs = (generate(runner_of(directory, kernels, formats)) for kernels in KERNELS)
    assert native == torchs


def test_every_processor_gives_the_same_tokens() -> None:
    """Without AVX-512: other instructions, and other orders of a few sums."""
    load_build("avx2")
    directory = ROOT / "models" / "pageant-stories"
    small = runner_of(directory, "native", (*FLOAT32, ("cpu_target", "x86-64-v3")))
    assert generate(small) == generate(runner_of(directory, "native", FLOAT32))


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


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_head_in_float16_is_left_to_torch(quantization: str) -> None:
    load_build("native")
    formats = {"dtype": "float16", "quantization": quantization, "quantization_head": "none"}
    settings = Settings.of(model=str(ROOT / "models" / "pageant-stories-draft"), num_blocks=64, **formats)
    runner = load_runner(settings)
    assert runner.no_native.startswith("this model is not served: they do not compute in float16")
    assert [len(output) for output in generate(runner)] == [30] * 6
    with pytest.raises(ConfigError, match=r"^kernels is .native., but this model is not served: .*, head float16"):
        load_runner(settings.replace(kernels="native"))


WEIGHED = """
import sys
from pathlib import Path
from engine.loading.load import load_runner
from shared.config import Settings
from tests.engine.driver import Driver

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

load_runner(Settings.of(model=sys.argv[1], kernels="native", num_blocks=4, load_format="dummy", max_model_len=32))
begin = peak()
runner = load_runner(Settings.of(model=sys.argv[2], kernels="native", num_blocks=256, max_model_len=1024))
driver = Driver(runner)
for row in range(4):
    driver.add(row, [5] * 1000)
driver.generate(2, chunk=64)
print(peak() - begin)
"""


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_pool_are_what_the_worker_holds(tied: bool, tmp_path: Path) -> None:
    """At its peak, which loading is part of: no second copy of anything, neither in memory nor of the file's pages."""
    load_build("native")
    for name, large in (("small", False), ("large", True)):
        (tmp_path / name).mkdir()
        weights = write_checkpoint(tmp_path / name, tied=tied, large=large)
    command = [sys.executable, "-c", WEIGHED, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    pool = 256 * 16 * 8 * 2 * 512 * 2
    taken = int(done.stdout.splitlines()[-1])
    assert weights + 0.9 * pool < taken < 1.15 * (weights + pool) + (8 << 20), "bytes; 8 MiB for the step's activations"


def write_checkpoint(directory: Path, *, tied: bool, large: bool) -> int:
    """A random checkpoint in bfloat16; returns its bytes."""
    size = 512 if large else 64
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": 8,
        "num_attention_heads": size // 64,
        "max_position_embeddings": 1024,
        "vocab_size": 16000 if large else 100,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = parse_config(raw)
    source = DummyWeights(config)
    tensors = {part.name: source.take(part).bfloat16() for part in tensors_of(config).parts()}
    save_file(tensors, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())
