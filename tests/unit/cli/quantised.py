"""Quantised checkpoints for commands: fixtures of the engine's tests, with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "engine" / "weights" / "quantised" / "fixtures"


def quantised_copy(directory: Path, fixture: str = "ct-w4a16") -> Path:
    shutil.copytree(FIXTURES / fixture, directory)
    shutil.copy(ROOT / "models" / "pageant-stories" / "tokenizer.json", directory)
    return directory
