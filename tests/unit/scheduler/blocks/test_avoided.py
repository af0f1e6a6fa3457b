"""Names that did not come are computed for a while."""

from __future__ import annotations

import pytest

from services.scheduler.blocks import avoided
from services.scheduler.blocks.avoided import AVOID_SECONDS, AvoidedNames


def test_each_is_avoided_until_its_time_is_over() -> None:
    names = AvoidedNames()
    names.add([b"a", b"b"], 5.0)
    names.add([b"a"], 7.0)
    assert names.has(b"a", 5.0) and not names.has(b"c", 5.0)
    assert not names.has(b"b", 5.0 + AVOID_SECONDS) and names.has(b"a", 5.0 + AVOID_SECONDS)
    assert not names.has(b"a", 7.0 + AVOID_SECONDS)


def test_of_names_without_end_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avoided, "MAX_AVOIDED", 2)
    names = AvoidedNames()
    names.add([b"a", b"b"], 5.0)
    names.add([b"a"], 6.0)
    names.add([b"c"], 7.0)
    assert [names.has(name, 8.0) for name in (b"a", b"b", b"c")] == [True, False, True]
