"""Simple rules of prose: a process is no person, and no sentence makes a riddle of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.reading import DOCUMENTS, FENCE, GENERATED, ROOT, SPAN, name_of

PERSONS = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|everybody|everyone|anybody|anyone|someone|no one|who's)\b", re.IGNORECASE
)
RIDDLES = re.compile(r"\bwhat (is|was) told\b|\bis told of\b", re.IGNORECASE)
PAGES = (*DOCUMENTS, *GENERATED, ROOT / "llms.txt")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_sentence_makes_a_person_of_a_process(path: Path) -> None:
    """Write which process it is, or `a process that`; of people, write `users` or `a client`."""
    text = SPAN.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))
    found = [line.strip() for line in text.splitlines() if PERSONS.search(line) or RIDDLES.search(line)]
    assert not found, f"{name_of(path)}: {found}"
