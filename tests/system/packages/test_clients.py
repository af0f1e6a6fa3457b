"""Calls of tools as langchain-openai and instructor make them, by the packages themselves, against a real troupe.

PAGEANT_CLIENTS names the Python of an environment that has both; scripts/prove_clients makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import troupe

CLIENTS = os.environ.get("PAGEANT_CLIENTS", "")
CALLS = Path(__file__).parent / "clients" / "calls.py"
NUM_CALLS = 10

pytestmark = pytest.mark.skipif(
    not CLIENTS, reason="needs langchain-openai and instructor (PAGEANT_CLIENTS, scripts/prove_clients)"
)


def calls(directory: Path, *options: str) -> dict[str, list[Any]]:
    """How each of the calls of each case ended."""
    with troupe(directory, "--num-threads", "1", "--tool-call-parser", "hermes", *options) as running:
        command = [CLIENTS, str(CALLS), f"{running.url}/v1", "pageant-stories", str(NUM_CALLS)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    print(json.dumps(found))
    return found


def test_every_call_ends_and_is_read(tmp_path: Path) -> None:
    for name, ends in calls(tmp_path).items():
        assert len(ends) == NUM_CALLS
        assert all(reason != "length" and is_read for reason, _, is_read in ends), (name, ends)


def test_open_objects_are_why_they_did_not(tmp_path: Path) -> None:
    """Without this, the test above might pass by doing nothing."""
    found = calls(tmp_path, "--closed-objects", "none")
    assert sum(reason == "length" for ends in found.values() for reason, _, _ in ends) > len(found)
