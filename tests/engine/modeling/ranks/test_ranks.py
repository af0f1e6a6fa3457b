"""A group of ranks computes what one process does, bit for bit; it ends when a rank does, or reads another step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from services.worker.groups.ranks import RankGroup, WatchedRanks
from shared.config import Settings
from shared.errors import FatalError
from shared.messages.steps import TokenLogprobs
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.ranks import ranked
from tests.kernels.cpu.natives import load_build

ROOT = Path(__file__).resolve().parents[4]
MODEL = ROOT / "models" / "pageant-stories"
FIXTURES = ROOT / "tests" / "engine" / "weights" / "quantised" / "fixtures"
WIDE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 112}

Said = list[tuple[list[int], list[TokenLogprobs | None], list[TokenLogprobs]]]


def say(runner: ModelRunner) -> Said:
    """Greedy, sampled and truncated rows side by side, prompts in chunks, with all that is said of their tokens."""
    driver = Driver(runner)
    for row in range(4):
        params = SamplingParams(
            temperature=(0.0, 1.0, 0.7)[row % 3], top_p=0.9 if row == 2 else 1.0, logprobs=5, prompt_logprobs=row % 2
        )
        prompt = random_prompt(5 + 11 * row, seed=row, vocab_size=runner.capacity.vocab_size)
        driver.add(row, prompt, params, seed=row)
    driver.add(4, random_prompt(7, seed=4, vocab_size=runner.capacity.vocab_size))
    driver.generate(8, chunk=16)
    driver.generate(12, chunk=16)
    return [(one.output, one.logprobs, one.prompt_logprobs) for one in driver.live.values()]


def settings_of(directory: Path, **formats: Any) -> Settings:
    return Settings.of(model=str(directory), kernels="native", num_blocks=64, num_threads=1, **formats)


def assert_same(settings: Settings, *ranks: int) -> None:
    load_build("native")
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    for count in ranks:
        with ranked(settings, count, has_windows=False) as (runner, _):
            assert runner.fingerprint == alone.fingerprint
            assert say(runner) == wanted, f"{count} ranks"


def assert_killed_rank_ends_the_group(settings: Settings) -> None:
    with ranked(settings, 2) as (runner, group):
        disturb(runner, group, signal.SIGKILL, "a rank has ended")
        assert group.failure == "rank 1 of the group has ended with status -9"


def assert_frozen_rank_ends_the_group(settings: Settings) -> None:
    with ranked(settings, 2) as (runner, group):
        disturb(runner, group, signal.SIGSTOP, "a rank is silent")
        assert group.failure == "rank 1 of the group has been silent for 2 s"
        group.processes[0].kill()  # a fork is waited for without a limit


def disturb(runner: ModelRunner, group: RankGroup, number: signal.Signals, words: str) -> None:
    """The first rank that does not lead gets the signal while tokens are made, and the next step fails with `words`."""
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(3)
    os.kill(group.processes[0].pid, number)
    with pytest.raises(FatalError, match=words):
        driver.generate(400)
    until_failed(group)


def until_failed(group: WatchedRanks) -> None:
    """The step may notice it before the thread that watches does."""
    deadline = time.monotonic() + 10
    while not group.failure:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_three_and_four_ranks_say_what_one_does() -> None:
    assert_same(settings_of(MODEL, dtype="float32"), 2, 3, 4)


@pytest.mark.parametrize(
    "formats", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_in_every_format(formats: dict[str, str]) -> None:
    assert_same(settings_of(MODEL, **formats), 3)


# Norms behind linears, soft caps and windows; transposed and fused queries, keys and values, learned positions, no
# gates; pieces of stored matrices; biases and norms of heads; heads of two sizes, and keys that are values too.
@pytest.mark.parametrize("variant", ["gemma2", "gpt2-untied", "phi3-partial", "qwen3-yarn", "gemma4"])
def test_every_kind_of_dense_model(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", {"num_key_value_heads": 2, "num_global_key_value_heads": 2})
    assert_same(settings_of(tmp_path, dtype="float32"), 2)


# A shared expert and its gate; sinks and biases of experts, stored as they take turns.
@pytest.mark.parametrize(
    ("variant", "formats"),
    [("qwen2-moe", {"dtype": "float32"}), ("qwen2-moe", {"quantization": "int8"}), ("gpt-oss", {"dtype": "bfloat16"})],
)
def test_mixtures_of_experts(variant: str, formats: dict[str, str], tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "num_key_value_heads": 2}
    save_checkpoint(tmp_path, variant, "native", sizes)
    assert_same(settings_of(tmp_path, **formats), 2)


def test_heads_that_do_not_divide_by_the_ranks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-bias", "native", WIDE)
    assert_same(settings_of(tmp_path, dtype="bfloat16", kv_cache_dtype="int8"), 2, 3)


@pytest.mark.parametrize("fixture", ["gptq-4-asymmetric", "ct-fp8-dynamic", "ct-w8a8-dynamic"])
def test_codes_of_a_checkpoint(fixture: str) -> None:
    assert_same(settings_of(FIXTURES / fixture), 2)


def test_a_rank_that_ends_ends_the_group_at_once() -> None:
    assert_killed_rank_ends_the_group(settings_of(MODEL))


def test_a_frozen_rank_ends_the_group_too() -> None:
    assert_frozen_rank_ends_the_group(settings_of(MODEL))


def test_ranks_that_read_different_steps_give_no_token() -> None:
    with ranked(settings_of(MODEL), 2) as (runner, group):
        driver = Driver(runner)
        driver.add(0, [5, 6, 7])
        driver.generate(3)
        assert group.model is not None
        group.model.forget_orders()
        with pytest.raises(FatalError, match="its ranks read different steps"):
            driver.generate(6)
        assert len(driver.live[0].output) == 3
