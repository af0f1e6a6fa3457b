"""A pipeline whose stages are groups of ranks computes what one process does, bit for bit, and ends as a whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.loading.load import load_runner
from services.worker.groups.ranks import RankGroup
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.ranks.test_ranks import MODEL, WIDE, say, settings_of
from tests.engine.ranks import linked, ranked_stages
from tests.kernels.cpu.natives import load_build


def assert_same(settings: Settings, stages: int, ranks: int) -> None:
    load_build("native")
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    with ranked_stages(settings, stages, has_windows=False, ranks=ranks) as (runner, _):
        assert runner.fingerprint == alone.fingerprint
        assert say(runner) == wanted


@pytest.mark.parametrize("formats", [{"dtype": "float32"}, {"quantization": "int4"}], ids=str)
def test_two_stages_of_two_ranks_say_what_one_process_does(formats: dict[str, Any]) -> None:
    assert_same(settings_of(MODEL, **formats), 2, 2)


# Learned positions, and an embedding that is not the head; norms behind linears, and an embedding that is scaled.
@pytest.mark.parametrize("variant", ["gpt2-untied", "gemma2"])
def test_kinds_of_models(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", {"num_key_value_heads": 2})
    assert_same(settings_of(tmp_path, dtype="bfloat16"), 2, 2)


def test_three_stages_of_heads_that_do_not_divide(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-bias", "native", WIDE)
    assert_same(settings_of(tmp_path, dtype="float32"), 3, 2)


def test_stages_that_join_over_tcp_start_their_ranks() -> None:
    settings = settings_of(MODEL, dtype="float32")
    load_build("native")
    wanted = say(load_runner(settings, has_windows=False))
    settings = settings.replace(tensor_parallel_size=2)
    with linked(settings, 2, has_windows=False, kind="pipeline_parallel_size") as (runner, _, _):
        assert say(runner) == wanted


def begun(runner: Any) -> Driver:
    driver = Driver(runner)
    driver.add(0, [5, 6, 7])
    driver.generate(3)
    return driver


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def test_a_rank_of_another_stage_that_ends_ends_the_group() -> None:
    with ranked_stages(settings_of(MODEL), 2) as (runner, group):
        driver = begun(runner)
        assert isinstance(group.others, RankGroup)
        (rank,) = children(group.others.processes[0].pid)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)


def test_a_rank_of_the_leaders_stage_that_ends_ends_the_group() -> None:
    with ranked_stages(settings_of(MODEL), 2) as (runner, group):
        driver = begun(runner)
        os.kill(group.within.processes[0].pid, signal.SIGKILL)
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)
        assert group.failure == "rank 1 of the group has ended with status -9"


def test_a_rank_that_reads_another_step_gives_no_token() -> None:
    with ranked_stages(settings_of(MODEL), 2) as (runner, group):
        driver = begun(runner)
        assert group.within.model is not None
        group.within.model.forget_orders()
        with pytest.raises(FatalError, match="its ranks read different steps"):
            driver.generate(6)
        assert len(driver.live[0].output) == 3


@pytest.mark.parametrize(
    ("stages", "ranks", "words"),
    [
        (64, 1, "pipeline_parallel_size is 64, but the model has"),
        (2, 5, "tensor_parallel_size is 5, but the model has"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(stages: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        load_runner(settings_of(MODEL).replace(pipeline_parallel_size=stages, tensor_parallel_size=ranks))
