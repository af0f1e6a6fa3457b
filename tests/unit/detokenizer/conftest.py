"""The tokenizers that decoders and streams are tried over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.detokenizer.models import BUNDLED, NAMES


@pytest.fixture(params=["bundled", "shared"])
def paths(request: pytest.FixtureRequest) -> list[Path]:
    """To be drawn from; skips, but for the bundled one, where the shared data are absent."""
    if request.param == "bundled":
        return [BUNDLED]
    return [Path(request.getfixturevalue("data_dir")) / name for name in NAMES]
