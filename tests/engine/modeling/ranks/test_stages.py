"""A pipeline of stages computes what one process does, bit for bit; it ends when a stage does, or misses an order."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.loading.load import load_runner
from engine.weights.digest import DigestMemory
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.ranks.test_ranks import FIXTURES, MODEL, say, settings_of
from tests.engine.ranks import linked, staged
from tests.kernels.cpu.natives import load_build

FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "int4"},
]


def assert_same(settings: Settings, *stages: int) -> None:
    load_build("native")
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    for count in stages:
        with staged(settings, count, has_windows=False) as (runner, _):
            assert runner.fingerprint == alone.fingerprint
            assert say(runner) == wanted, f"{count} stages"


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_two_and_three_stages_say_what_one_process_does(formats: dict[str, Any]) -> None:
    assert_same(settings_of(MODEL, **formats), 2, 3)


# Windows in some layers, norms behind linears, soft caps, an embedding that is scaled; learned positions and an
# embedding that is not the head; norms over all heads; experts with a shared one; latent attention.
@pytest.mark.parametrize("variant", ["gemma2", "gpt2-untied", "olmo2", "qwen2-moe", "deepseek-v3"])
def test_every_kind_of_model(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native")
    assert_same(settings_of(tmp_path, dtype="float32"), 2)


def save_of_two_layers(fixture: str, directory: Path) -> None:
    """A quantised checkpoint whose only layer stands there twice."""
    tensors = load_file(FIXTURES / fixture / "model.safetensors")
    first, second = "model.layers.0.", "model.layers.1."
    again = {name.replace(first, second): tensor.clone() for name, tensor in tensors.items() if first in name}
    save_file(tensors | again, directory / "model.safetensors")
    config = json.loads((FIXTURES / fixture / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")


@pytest.mark.parametrize("fixture", ["gptq-4-asymmetric", "ct-fp8-dynamic"])
def test_codes_of_a_checkpoint(fixture: str, tmp_path: Path) -> None:
    save_of_two_layers(fixture, tmp_path)
    assert_same(settings_of(tmp_path), 2)


def test_stages_that_join_over_tcp() -> None:
    settings = settings_of(MODEL, dtype="float32")
    load_build("native")
    wanted = say(load_runner(settings, has_windows=False))
    with linked(settings, 3, has_windows=False, kind="pipeline_parallel_size") as (runner, _, _):
        assert say(runner) == wanted


def test_all_stages_digest_the_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is remembered."""
    monkeypatch.setattr("engine.loading.load.user_memory", lambda: DigestMemory(tmp_path / "alone"))
    save_of_two_layers("gptq-4-asymmetric", tmp_path)
    settings = settings_of(tmp_path)
    load_build("native")
    wanted = load_runner(settings).fingerprint
    monkeypatch.setattr("engine.loading.load.user_memory", lambda: DigestMemory(tmp_path / str(os.getpid())))
    with staged(settings, 2) as (runner, _):
        assert runner.fingerprint == wanted is not None


def test_a_stage_that_ends_ends_the_group_at_once() -> None:
    with staged(settings_of(MODEL), 3) as (runner, group):
        driver = Driver(runner)
        driver.add(0, [5, 6, 7])
        driver.generate(3)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)


def test_a_frozen_stage_ends_the_group_too() -> None:
    with staged(settings_of(MODEL), 2) as (runner, group):
        driver = Driver(runner)
        driver.add(0, [5, 6, 7])
        driver.generate(3)
        os.kill(group.processes[0].pid, signal.SIGSTOP)
        with pytest.raises(FatalError, match="a rank is silent"):
            driver.generate(400)
        assert group.failure == "rank 1 of the group has been silent for 2 s"
        group.processes[0].kill()  # a fork is waited for without a limit


def test_a_stage_that_misses_an_order_gives_no_token() -> None:
    with staged(settings_of(MODEL), 2) as (runner, group):
        driver = Driver(runner)
        driver.add(0, [5, 6, 7])
        driver.generate(3)
        assert group.model is not None
        group.model.forget_orders()
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(6)
        assert len(driver.live[0].output) == 3


def test_more_stages_than_layers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size is 64, but the model has \d+ layers"):
        load_runner(settings_of(MODEL).replace(pipeline_parallel_size=64))
