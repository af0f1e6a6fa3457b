"""What a scheduler says in fixed courses of events is what it said: what is to change nothing has changed nothing.

PAGEANT_WRITE_GOLDEN=1 pytest tests/unit/scheduler/test_courses.py     after a deliberate change of what is said
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.unit.scheduler.courses import COURSES, DIGITS, digests

KEPT = Path(__file__).with_name("courses.json")  # digests of what was said, one for each event


@cache
def lines_of(name: str) -> list[str]:
    return COURSES[name]()


@pytest.mark.parametrize("name", COURSES)
def test_what_is_said_is_what_was_said(name: str) -> None:
    lines = lines_of(name)
    found = digests(lines)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if os.environ.get("PAGEANT_WRITE_GOLDEN"):
        text = json.dumps({one: digest for one, digest in (kept | {name: found}).items() if one in COURSES}, indent=1)
        KEPT.write_text(text + "\n", encoding="utf-8")
        return
    pairs = zip((found[at : at + DIGITS] for at in range(0, len(found), DIGITS)), lines, strict=True)
    for event, (digest, line) in enumerate(pairs):
        before = kept[name][DIGITS * event :][:DIGITS]
        assert digest == before, f"event {event} of python -m tests.unit.scheduler.courses {name} is another: {line}"
    assert len(found) == len(kept[name]), "fewer events than there were"


def test_the_courses_are_eventful() -> None:
    """So that each kind of decision is among what is compared."""
    said = "".join("".join(lines_of(name)) for name in COURSES)
    for word in ("sequence_preempted", "block_copies", "num_draft_tokens", "closed", "request_attached", "deadline",
                 "released_rows", "num_wanted", "no worker is ready", "opened", "num_ahead", "closed_rows",
                 "evicted_ago", "embedding", "prompt_logprobs", "ledgers_differ"):  # fmt: skip
        assert word in said, word
