"""Ranks that divide the rows of norms say what one process says, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.loading.load import load_runner
from shared.config import load_settings
from shared.errors import ConfigError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.modeling.ranks.test_expert_ranks import FORMATS, SIZES
from tests.engine.modeling.ranks.test_linked_ranks import streams
from tests.engine.modeling.ranks.test_ranks import MODEL, say, settings_of
from tests.engine.ranks import linked, ranked


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_every_format(ranks: int, formats: dict[str, Any]) -> None:
    settings = settings_of(MODEL, **formats)
    wanted = say(load_runner(settings, has_windows=False))
    with ranked(settings.replace(enable_sequence_parallel=True), ranks, has_windows=False) as (runner, _):
        assert say(runner) == wanted


# A norm behind linears too; layer norms; no norm before linears; a mixture, whose experts' norms are not divided.
@pytest.mark.parametrize("variant", ["gemma2", "gpt2", "gpt-oss", "qwen2-moe"])
def test_every_kind_of_norm(variant: str, tmp_path: Path) -> None:
    sizes = SIZES | {"moe_intermediate_size": 64} if variant.endswith("moe") else None
    save_checkpoint(tmp_path, variant, "native", sizes)
    settings = settings_of(tmp_path, dtype="bfloat16")
    wanted = say(load_runner(settings, has_windows=False))
    with ranked(settings.replace(enable_sequence_parallel=True), 2, has_windows=False) as (runner, _):
        assert say(runner) == wanted


@pytest.mark.parametrize("formats", FORMATS[:2], ids=str)
def test_over_tcp(formats: dict[str, Any]) -> None:
    settings = settings_of(MODEL, **formats)
    wanted = say(load_runner(settings, has_windows=False))
    with linked(settings.replace(enable_sequence_parallel=True), 2, has_windows=False) as (runner, *_):
        assert say(runner) == wanted


def test_many_streams() -> None:
    settings = settings_of(MODEL, max_num_seqs=16).replace(num_blocks=256)
    wanted = streams(load_runner(settings, has_windows=False))
    with ranked(settings.replace(enable_sequence_parallel=True), 2, has_windows=False) as (runner, _):
        assert streams(runner) == wanted


def test_one_rank_has_no_rows_to_divide() -> None:
    with pytest.raises(ConfigError, match=r"^enable_sequence_parallel needs tensor_parallel_size above 1"):
        load_settings({"enable_sequence_parallel": True}, environ={})
