"""The tokenizers that decoders and streams are tried over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.detokenizer.models import BUNDLED, NAMES, write_spelled


@pytest.fixture(scope="session")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that was written here, with tokens of single bytes."""
    path = tmp_path_factory.mktemp("spelled")
    write_spelled(path)
    return path


@pytest.fixture(params=["bundled", "spelled", "shared"])
def paths(request: pytest.FixtureRequest) -> list[Path]:
    """To be drawn from; the shared ones are skipped where the shared data are absent."""
    if request.param == "bundled":
        return [BUNDLED]
    if request.param == "spelled":
        return [Path(request.getfixturevalue("spelled"))]
    return [Path(request.getfixturevalue("data_dir")) / name for name in NAMES]
