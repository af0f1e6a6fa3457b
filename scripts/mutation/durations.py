"""A plugin of pytest that writes how long each test took, as JSON, to the file that MUTATION_DURATIONS names."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTATION_DURATIONS"]).write_text(json.dumps(_seconds), encoding="utf-8")
