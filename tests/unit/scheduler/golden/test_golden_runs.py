"""What a scheduler says in fixed runs of events is what it said: what is to change nothing has changed nothing.

    PAGEANT_WRITE_GOLDEN=1 pytest tests/unit/scheduler/golden/test_golden_runs.py

writes the digests again after a deliberate change of decisions or messages.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.unit.scheduler.golden.golden_runs import DIGITS, GOLDEN_RUNS, GROUP, digests

KEPT = Path(__file__).with_name("golden_runs.json")  # digests of the recorded lines


@cache
def lines_of(name: str) -> list[str]:
    return GOLDEN_RUNS[name]()


@pytest.mark.parametrize("name", GOLDEN_RUNS)
def test_what_is_said_is_what_was_said(name: str) -> None:
    lines = lines_of(name)
    found = digests(lines)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if os.environ.get("PAGEANT_WRITE_GOLDEN"):
        text = json.dumps({one: kept.get(one, "") for one in GOLDEN_RUNS} | {name: "".join(found)}, indent=1)
        KEPT.write_text(text + "\n", encoding="utf-8")
        return
    for number, digest in enumerate(found):
        events = lines[GROUP * number :][:GROUP]
        before = kept[name][DIGITS * number :][:DIGITS]
        where = f"events {GROUP * number} ... of python -m tests.unit.scheduler.golden.golden_runs {name} are others"
        assert digest == before, f"{where}: {events}"
    assert len(found) * DIGITS == len(kept[name]), "fewer events than there were"


def test_the_runs_are_eventful() -> None:
    """So that each kind of decision is among what is compared."""
    said = "".join("".join(lines_of(name)) for name in GOLDEN_RUNS)
    for word in ("sequence_preempted", "block_copies", "num_draft_tokens", "closed", "request_attached", "deadline",
                 "released_rows", "num_wanted", "no worker is ready", "opened", "num_ahead", "closed_rows",
                 "evicted_ago", "embedding", "prompt_logprobs", "ledgers_differ", "state_loads", "state_saves",
                 "state_forks"):  # fmt: skip
        assert word in said, word
