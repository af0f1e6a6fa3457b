"""Stop strings against cutting the whole text."""

from __future__ import annotations

import time
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.stops import StopMatcher

letters = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The meaning: the string complete first wins, ties by list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(text=letters, stops=stop_lists, include=st.booleans(), data=st.data())
def test_any_split_equals_cutting_the_whole(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    expected, winner = cut_whole(text, stops, include)
    matcher, shown, rest = StopMatcher(stops, include=include), "", text
    while rest and matcher.matched is None:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(shown)  # never a part of a stop string
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, winner)


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=stop_lists)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops, include=False), ""
    for size, character in enumerate(text, start=1):
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
        starts = (n for n in range(size + 1) if any(stop.startswith(text[n:size]) for stop in stops))
        assert len(shown) == next(starts)


@settings(max_examples=200, deadline=None)
@given(early=letters, late=letters, stops=stop_lists)
def test_unarmed_text_passes_but_may_begin_a_later_match(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = matcher.push(early, armed=False)
    assert matcher.matched is None
    shown += matcher.push(late)
    ends = [
        (end, stop) for end in range(len(early) + 1, len(early + late) + 1) for stop in stops
        if (early + late)[:end].endswith(stop)
    ]  # fmt: skip
    if not ends:
        assert shown + matcher.flush() == early + late
    else:
        end, stop = ends[0]
        assert shown == (early + late)[: end - len(stop)]
        assert matcher.matched == str(stop)


def test_without_any_string_nothing_is_held_back() -> None:
    assert StopMatcher([], include=False).push("the end") == "the end"


def test_including_the_string_holds_nothing_back() -> None:
    matcher = StopMatcher(["END"], include=True)
    assert matcher.push("the EN") == "the EN"
    assert matcher.push("D of it") == "D"
    assert matcher.matched == "END"


def test_long_strings_and_repetitive_text_take_linear_time() -> None:
    matcher = StopMatcher(["a" * 1023 + c for c in "bcdefghi"], include=False)
    started = time.process_time()
    for _ in range(5000):
        matcher.push("aaaa")
    assert time.process_time() - started < 2
    assert matcher.matched is None


def test_every_short_text_is_cut_as_the_whole_is() -> None:
    """Of two letters, with every short stop string: what random texts seldom hit is among these."""
    stops = ["".join(letters) for size in range(1, 6) for letters in product("ab", repeat=size)]
    texts = ["".join(letters) for letters in product("ab", repeat=8)]
    for stop in stops:
        for text in texts:
            matcher, shown = StopMatcher([stop], include=False), ""
            for character in text:
                shown += matcher.push(character)
                if matcher.matched is not None:
                    break
            expected, winner = cut_whole(text, [stop], False)
            assert (shown + matcher.flush(), matcher.matched) == (expected, winner), (stop, text)
