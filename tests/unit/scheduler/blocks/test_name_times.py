"""Names with times, of which the latest are kept."""

from __future__ import annotations

from services.scheduler.blocks.name_times import NameTimes


def test_each_holds_until_its_time_is_over() -> None:
    names = NameTimes(9)
    names.note_all([b"a", b"b"], 15.0)
    names.note(b"a", 17.0)
    assert names.has_until(b"a", 5.0) and not names.has_until(b"c", 5.0)
    assert not names.has_until(b"b", 15.0) and names.has_until(b"a", 15.0)
    assert not names.has_until(b"a", 17.0)
    assert (names.get(b"a"), names.get(b"b"), names.get(b"c")) == (17.0, 15.0, None)


def test_of_names_without_end_the_newest_are_kept() -> None:
    names = NameTimes(2)
    names.note_all([b"a", b"b"], 15.0)
    names.note(b"a", 16.0)
    names.note(b"c", 17.0)
    assert [names.has_until(name, 8.0) for name in (b"a", b"b", b"c")] == [True, False, True]
