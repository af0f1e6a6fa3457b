"""The short form of scripts/soak, where PAGEANT_TEST_SOAK=1 asks for it: the long one is half an hour."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.system.harness import ROOT


@pytest.mark.skipif("PAGEANT_TEST_SOAK" not in os.environ, reason="takes two minutes: PAGEANT_TEST_SOAK=1")
def test_no_service_grows_by_much_in_two_minutes() -> None:
    command = ["scripts/soak", "--minutes", "2", "--tenants", "1000", "--sample", "1", "--bound", "15", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "scheduler" in done.stdout and "came to its end" in done.stdout
