"""Ranks that have whole experts compute what one process does, bit for bit, and load no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.description.ranks import Place
from engine.description.reading import read_config
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.ranks.ranks import RankDecoder
from engine.weights.part_source import RankSource
from engine.weights.source import Checkpoint
from services.worker.groups.ranks import RankGroup
from shared.errors import ConfigError, FatalError
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.ranks.test_linked_ranks import streams
from tests.engine.modeling.ranks.test_ranks import say, settings_of
from tests.engine.ranks import linked, ranked
from tests.engine.weights.quantised.encoders import change_config, change_tensors, gptq
from tests.engine.weights.quantised.test_gpt_oss import save_stacks
from tests.kernels.cpu.natives import load_build

SIZES = {
    "num_key_value_heads": 4,
    "hidden_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}
FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"quantization": "int4", "quantization_group": 32},
]


def assert_same(directory: Path, *ranks: int, over_tcp: bool = False, **formats: Any) -> None:
    load_build("native")
    settings = settings_of(directory, **formats)
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    spread = settings.replace(enable_expert_parallel=True)
    for count in ranks:
        with (linked if over_tcp else ranked)(spread, count, has_windows=False) as (runner, *_):
            assert runner.fingerprint == alone.fingerprint
            assert say(runner) == wanted, f"{count} ranks"


# Seven experts, which no number of ranks divides, and a dense layer between.
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_in_every_format(formats: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    assert_same(tmp_path, 2, 3, **formats)


# Six experts and windows; five with biases and clamps, stored in one stack; a shared expert, cut, and its gate.
@pytest.mark.parametrize("formats", FORMATS[:3], ids=str)
@pytest.mark.parametrize("variant", ["mixtral", "gpt-oss", "qwen2-moe"])
def test_every_kind_of_mixture(variant: str, formats: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", SIZES)
    assert_same(tmp_path, 2, **formats)


@pytest.mark.parametrize("formats", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "none"}], ids=str)
def test_codes_of_a_mixture(formats: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)

    def encode(tensors: dict[str, Tensor]) -> None:
        for name in [name for name, one in tensors.items() if "layers" in name and one.ndim == 2 and not len(one) % 8]:
            stored, _ = gptq(tensors.pop(name), symmetric=True)
            tensors.update({name.removesuffix(".weight") + suffix: one for suffix, one in stored.items()})

    change_tensors(tmp_path, encode)
    change_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})
    assert_same(tmp_path, 2, **formats)


def test_stacks_of_codes_with_biases(tmp_path: Path) -> None:
    save_stacks(tmp_path, "native", {"num_key_value_heads": 4})
    assert_same(tmp_path, 2, dtype="bfloat16")


def test_experts_in_several_formats_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}

    def encode(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.mlp.experts.3" in name]:
            stored, _ = gptq(tensors.pop(name), symmetric=True)
            tensors.update({name.removesuffix(".weight") + suffix: one for suffix, one in stored.items()})

    change_tensors(tmp_path, encode)
    change_config(tmp_path, quantization_config=scheme)
    spec = read_config(tmp_path)
    why = "enable_expert_parallel is set, but layer 0 has experts in several stored formats"
    with pytest.raises(ConfigError, match=why):
        RankSource(Checkpoint(tmp_path, spec), spec, Place(0, 2, whole_experts=True))


@pytest.mark.parametrize(
    ("variant", "formats"),
    [("qwen3-moe", FORMATS[0]), ("qwen2-moe", FORMATS[1]), ("gpt-oss", FORMATS[1]), ("mixtral", FORMATS[2])],
    ids=str,
)
def test_over_tcp(variant: str, formats: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", SIZES)
    assert_same(tmp_path, 3 if variant == "qwen3-moe" else 2, over_tcp=True, **formats)


def test_long_prompts_in_the_order_of_experts(tmp_path: Path) -> None:
    """Of many rows one process adds products as they are made, and a group when all are there."""
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES | {"max_position_embeddings": 2048})
    settings = settings_of(tmp_path, dtype="bfloat16", max_num_batched_tokens=1200).replace(num_blocks=96)

    def scored(runner: ModelRunner) -> Any:
        driver = Driver(runner)
        driver.add(0, random_prompt(1100, seed=1), SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=3))
        driver.generate(3, chunk=1200)
        return [(one.output, one.logprobs, one.prompt_logprobs) for one in driver.live.values()]

    wanted = scored(load_runner(settings))
    with ranked(settings.replace(enable_expert_parallel=True), 2) as (runner, _):
        assert scored(runner) == wanted


def expert_bytes(decoder: NativeDecoder) -> list[int]:
    """Of each expert that a process has, in all layers."""
    mixtures = [layer.experts for layer in decoder._layers if layer.experts is not None]
    return [linear.packed.nbytes for one in mixtures for linear in (*one.gate_up, *one.down)]


def test_a_rank_has_its_experts_alone_in_memory(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    settings = settings_of(tmp_path, dtype="float32")
    alone = load_runner(settings)
    with ranked(settings.replace(enable_expert_parallel=True), 3) as (runner, _):
        assert isinstance(alone._model, NativeDecoder) and isinstance(runner._model, RankDecoder)
        whole, own = expert_bytes(alone._model), expert_bytes(runner._model._decoder)
        assert sum(own) * 7 == sum(whole) * 2, "the first of three ranks has two of seven experts"


def talking(runner: ModelRunner) -> Driver:
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(3)
    return driver


def test_a_killed_rank_ends_the_group_under_streams(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "mixtral", "native", SIZES)
    settings = settings_of(tmp_path, dtype="float32", max_num_seqs=16).replace(num_blocks=128)
    with ranked(settings.replace(enable_expert_parallel=True), 2, has_windows=False) as (runner, group):
        assert isinstance(group, RankGroup)
        driver = talking(runner)
        os.kill(group.processes[0].pid, signal.SIGKILL)
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)
        assert group.failure == "rank 1 of the group has ended with status -9"


def single(runner: ModelRunner) -> list[int]:
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(12)
    return driver.live[0].output


@pytest.mark.parametrize("said", [single, streams])
def test_a_rank_without_rows_waits_for_nothing(said: Callable[[ModelRunner], Any], tmp_path: Path) -> None:
    """A token takes one of two experts: every step of a single stream leaves a rank with nothing."""
    sizes = SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 256}
    save_checkpoint(tmp_path, "mixtral", "native", sizes)
    settings = settings_of(tmp_path, max_num_seqs=16).replace(num_blocks=256)
    wanted = said(load_runner(settings, has_windows=False))
    for group in (ranked, linked):
        with group(settings.replace(enable_expert_parallel=True), 2, has_windows=False) as (runner, *_):
            assert said(runner) == wanted
