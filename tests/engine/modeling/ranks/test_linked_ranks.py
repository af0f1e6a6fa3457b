"""Ranks that share no memory compute what one process does, bit for bit, and a group that breaks gives no token."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.loading.load import load_runner
from shared.config import Settings
from shared.errors import FatalError
from shared.ranks.channel import BEAT, SILENCE
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.ranks.test_ranks import FIXTURES, MODEL, WIDE, say, settings_of
from tests.engine.ranks import linked
from tests.kernels.cpu.natives import load_build

NUM_STREAMS = 16
PATIENCE = 20.0  # seconds, for a busy machine


def assert_same(settings: Settings, *ranks: int) -> None:
    load_build("native")
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    for count in ranks:
        with linked(settings, count, has_windows=False) as (runner, _, _):
            assert runner.fingerprint == alone.fingerprint
            assert say(runner) == wanted, f"{count} ranks"


def test_three_ranks_say_what_one_does() -> None:
    assert_same(settings_of(MODEL, dtype="float32"), 3)


@pytest.mark.parametrize("formats", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_in_formats_whose_rows_are_converted(formats: dict[str, str]) -> None:
    assert_same(settings_of(MODEL, **formats), 2)


def test_codes_of_a_checkpoint() -> None:
    assert_same(settings_of(FIXTURES / "gptq-4-asymmetric"), 2)


# Norms behind linears, which every rank computes of all rows; heads that do not divide.
@pytest.mark.parametrize(
    ("variant", "sizes"), [("gemma2", {"num_key_value_heads": 2}), ("llama-bias", WIDE)], ids=["norms", "uneven"]
)
def test_kinds_of_dense_models(variant: str, sizes: dict[str, int], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", sizes)
    assert_same(settings_of(tmp_path, dtype="float32"), 2)


@pytest.mark.parametrize(("variant", "dtype"), [("qwen2-moe", "float32"), ("gpt-oss", "bfloat16")])
def test_mixtures_of_experts(variant: str, dtype: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "num_key_value_heads": 2}
    save_checkpoint(tmp_path, variant, "native", sizes)
    assert_same(settings_of(tmp_path, dtype=dtype), 2)


def streams(runner: Any) -> list[Any]:
    """Greedy and sampled rows in one batch, with log-probabilities."""
    driver = Driver(runner)
    for row in range(NUM_STREAMS):
        params = SamplingParams(temperature=row % 4 * 0.4, top_k=row % 3 * 20, logprobs=3)
        driver.add(row, random_prompt(3 + 5 * row, seed=row, vocab_size=runner.capacity.vocab_size), params, seed=row)
    driver.generate(12, chunk=32)
    return [(one.output, one.logprobs) for one in driver.live.values()]


def test_sixteen_streams_over_tcp() -> None:
    load_build("native")
    settings = settings_of(MODEL, max_num_seqs=NUM_STREAMS).replace(num_blocks=256)
    wanted = streams(load_runner(settings))
    with linked(settings, 2) as (runner, _, _):
        assert streams(runner) == wanted


def talking(runner: Any) -> Driver:
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(3)
    return driver


def test_a_killed_rank_is_noticed_within_half_a_second() -> None:
    with linked(settings_of(MODEL), 2) as (runner, group, (other,)):
        driver = talking(runner)
        os.kill(other.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)
        while not group.failure:  # says the same, of its own connection
            assert time.monotonic() - begun < PATIENCE
            time.sleep(0.001)
        # Closed, or reset, where it had not read all that came.
        assert re.match("rank 1 of the group has ended: .*(closed|reset)", group.failure)


def test_a_frozen_rank_is_noticed_while_a_step_waits_for_it() -> None:
    with linked(settings_of(MODEL), 2) as (runner, group, (other,)):
        driver = talking(runner)
        os.kill(other.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(FatalError, match="a rank is silent"):
            driver.generate(400)
        assert SILENCE - 2 * BEAT <= time.monotonic() - begun < PATIENCE
        assert group.failure == "rank 1 of the group has been silent for 2 s"


def test_ranks_that_read_different_steps_give_no_token() -> None:
    with linked(settings_of(MODEL), 2) as (runner, group, _):
        driver = talking(runner)
        assert group.model is not None
        group.model.forget_orders()
        with pytest.raises(FatalError, match=r"its ranks read different steps|a rank has ended"):
            driver.generate(6)
        assert len(driver.live[0].output) == 3
