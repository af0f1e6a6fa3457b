"""The thread that launches steps never waits for the device: a card's driver says so, or a device that cannot be read.

Tensors of torch's device "meta" have shapes and no contents: to ask one for a number, for the places where it is true,
or for a copy is an error.  Kernels are not launched there, and what the host is sent is zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import structlog
import torch
from torch import Tensor

from engine.description.reading import read_config
from engine.execution.runner import ModelRunner
from engine.loading import backend as backend_module
from engine.loading import load as loading
from engine.loading import reading
from engine.loading.backend import Backend, choose_backend
from engine.loading.graphs import DirectRecorder, GraphedDecoder
from engine.modeling.torch_decoder.decoder import Decoder
from engine.sampling.verification import Verdict, Verification
from engine.weights.source import open_weights
from kernels.interface import AttentionShape
from kernels.ops.steps import transfer
from kernels.provider import has_triton, triton_kernels
from shared.config import Settings
from shared.messages.steps import StepPlan
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton import launch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "meta")
LONGEST = 5
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, **PENALISED},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
    "all logprobs": {"temperature": 0.0, "logprobs": -1},
    "constrained": {
        "temperature": 0.9,
        "bad_words_token_ids": [[7], [9, 12]],
        "min_tokens": 12,
        "stop_token_ids": [5],
        "logit_bias": {9: 3.0},
        "allowed_token_ids": list(range(3, 60)),
    },
    "embedding": {"temperature": 0.0, "pooling": Pooling(kind=PoolingKind.MEAN, normalize=True)},
}


class Nothing:
    """In place of a kernel's launch."""

    def __call__(self, *args: Any, **options: Any) -> None: ...


def receive_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@contextmanager
def unreadable() -> Iterator[None]:
    """What would wait is an error."""
    with ExitStack() as stack:
        if HAS_GPU:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of the mode itself, at its first use in a process
                torch.cuda.set_sync_debug_mode("error")
        else:
            stack.enter_context(patch.object(transfer, "send", lambda tensor, device: tensor.to(device)))
            stack.enter_context(patch.object(transfer, "receive", receive_zeros))
            stack.enter_context(patch.object(type(launch._probe), "__getitem__", lambda kernel, grid: Nothing()))
        yield


def make_runner(model: Path, *, graphs: bool, early: bool) -> ModelRunner:
    settings = Settings.of(
        model=str(model), kernels="torch", device="cpu", dtype="float32", num_blocks=64, max_num_seqs=8, block_size=8
    )
    config = read_config(model)
    source = open_weights(settings.engine.load_format, model, config)
    backend: Backend = choose_backend(settings, config, source.dtype)
    kernels = triton_kernels(AttentionShape(config.head_shapes), early=early)
    backend = replace(backend, kernels=kernels, device=DEVICE)
    built = reading.build(backend, config, source, config.max_position_embeddings)
    if graphs:
        assert isinstance(built, Decoder)
        built = GraphedDecoder(built, DirectRecorder(), max_tokens=64, longest=LONGEST)
    plan = loading.plan_pool(settings, built, config.max_position_embeddings)
    return loading.make_runner(settings, loading.assemble(settings, built, backend, plan))


@pytest.fixture(params=["eager", "graphs", "graphs, early"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelRunner]:
    save_checkpoint(tmp_path, "mistral-window")
    made = make_runner(tmp_path, graphs=request.param != "eager", early="early" in request.param)
    with patch.object(ModelRunner, "launch", in_the_dark(ModelRunner.launch)):
        yield made


def in_the_dark(launch_plan: Callable[..., Any]) -> Callable[..., Any]:
    def launch_unreadable(self: ModelRunner, plan: StepPlan) -> Any:
        with unreadable():
            return launch_plan(self, plan)

    return launch_unreadable


@pytest.mark.parametrize("eager", [False, True])
def test_enforce_eager_does_without_graphs(tmp_path: Path, eager: bool) -> None:
    save_checkpoint(tmp_path, "llama-tied")
    settings = Settings.of(model=str(tmp_path), kernels="torch", device="cpu", dtype="float32", enforce_eager=eager)
    config = read_config(tmp_path)
    source = open_weights(settings.engine.load_format, tmp_path, config)
    on_cpu = choose_backend(settings, config, source.dtype)
    model = reading.build(on_cpu, config, source, config.max_position_embeddings)
    backend = replace(on_cpu, kernels=triton_kernels(AttentionShape(config.head_shapes)), device=torch.device("cuda"))
    with patch.object(reading, "CudaRecorder", DirectRecorder):
        made = reading.with_graphs(settings, backend, model)
        assert isinstance(made, Decoder if eager else GraphedDecoder)
        assert reading.with_graphs(settings, on_cpu, model) is model, "a CPU has no graphs"


def test_a_gpu_without_triton_is_told_of(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-tied")
    settings = Settings.of(model=str(tmp_path), dtype="float32")
    config = read_config(tmp_path)
    with (
        patch.object(backend_module, "has_triton", lambda: False),
        patch("kernels.provider.has_triton", lambda: False),
        patch.object(backend_module, "resolve_device", lambda name: torch.device("cuda")),
        structlog.testing.capture_logs() as logs,
    ):
        chosen = choose_backend(settings, config, torch.float32)
    assert chosen.kernels.name == "reference"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["triton_unavailable"]


def add_all(runner: ModelRunner) -> Driver:
    driver = Driver(runner)
    for row, fields in enumerate(KINDS.values()):
        driver.add(row, random_prompt(20, seed=row), SamplingParams(**fields), seed=row, eos_token_ids=[2])
    return driver


def test_prompts_in_chunks_and_decodes(runner: ModelRunner) -> None:
    driver = add_all(runner)
    for count in (12, 8):
        driver.step(dict.fromkeys(driver.live, count))
    driver.finish(len(KINDS) - 1)  # embeddings have no more than one token
    for _ in range(3):
        driver.step(dict.fromkeys(driver.live, 1))
    lengths = {len(sequence.output) for sequence in driver.live.values()}
    assert lengths == {4}
    assert driver.live[3].logprobs[-1] is not None and len(driver.live[3].prompt_logprobs) == 19


@pytest.mark.parametrize("rejection", [False, True])
def test_verifications(runner: ModelRunner, rejection: bool) -> None:
    driver = add_all(runner)
    driver.step(dict.fromkeys(driver.live, 20))
    driver.finish(len(KINDS) - 1)
    for step in range(4):
        drafts = {row: [7 + row] * ((row + step) % LONGEST) for row in driver.live}
        schedule = {row: 1 + len(tokens) for row, tokens in drafts.items()}
        result = driver.step(schedule, drafts, rejection=rejection)
        assert all(1 <= count <= taken for count, taken in zip(result.num_sampled, schedule.values(), strict=True))
        assert len(result.logprobs) == len(result.sampled_token_ids)


def test_only_greedy_verifications(runner: ModelRunner) -> None:
    """Their logits are never made."""
    driver = Driver(runner)
    for row in range(3):
        driver.add(row, random_prompt(9, seed=row))
    driver.step(dict.fromkeys(driver.live, 9))
    result = driver.step({0: 3, 1: 1, 2: 2}, {0: [4, 4], 2: [5]})
    assert len(result.num_sampled) == 3


def test_who_reads_is_seen(runner: ModelRunner) -> None:
    """A verification that has to know what was sampled."""

    class Reader(Verification):
        def settle(self, chosen: Any, *rest: Any) -> Verdict:
            chosen.cpu().numpy()
            return super().settle(chosen, *rest)

    runner._verification = Reader(runner._sampler)
    driver = Driver(runner)
    driver.add(0, random_prompt(9, seed=1))
    driver.step({0: 9})
    with pytest.raises((RuntimeError, NotImplementedError)):
        driver.step({0: 3}, {0: [4, 4]})
