"""What is known of stores: what they have, which is asked and which is given to, and how fast they are."""

from __future__ import annotations

import pytest

from services.scheduler.blocks import stores
from services.scheduler.blocks.stores import HALF_LIFE, StoreIndex

SPACE, OTHER = b"s" * 16, b"o" * 16
NAMES = [bytes([index]) * 16 for index in range(8)]
KEYS = [SPACE + name for name in NAMES]


def index_of(**kept: list[bytes]) -> StoreIndex:
    made = StoreIndex()
    for store, keys in kept.items():
        made.join(store)
        made.told(store, keys, [], is_first=True)
    return made


def test_a_store_s_account_says_what_has_changed_or_begins_anew() -> None:
    index = index_of(a=KEYS[:4])
    index.told("a", KEYS[4:6], KEYS[:1], is_first=False)
    assert [index.holds(SPACE, name) for name in NAMES] == [False, True, True, True, True, True, False, False]
    assert not index.holds(OTHER, NAMES[1]), "blocks of another space have other bytes"
    index.told("a", [*KEYS[:2], b"no key"], [], is_first=True)
    assert index.num_of("a") == 2 and index.num_of("b") == 0
    index.discard("a", SPACE, NAMES[:1])
    assert index.num_of("a") == 1
    index.empty("a")
    assert index.num_of("a") == 0 and "a" in index


def test_one_that_has_left_or_tells_untruths_is_not_listened_to() -> None:
    index = index_of(a=KEYS[:4], b=KEYS[:2])
    index.leave("a")
    index.told("a", KEYS, [], is_first=True)
    assert "a" not in index and index.num_of("a") == 0
    index.distrust("b")
    index.told("b", KEYS, [], is_first=True)
    assert index.longest(SPACE, NAMES) == ("", 0) and index.place_for("w") == ""
    index.leave("b")
    index.join("b")
    assert index.place_for("w") == "b", "its next life begins anew"


def test_a_store_that_tells_of_keys_without_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_KEYS", 4)
    index = index_of(a=KEYS[:4])
    assert index.num_of("a") == 4
    index.told("a", KEYS[4:5], [], is_first=False)
    assert index.num_of("a") == 0


def test_the_store_with_the_longest_prefix_is_asked() -> None:
    index = index_of(a=KEYS[:2], b=[*KEYS[:3], *KEYS[4:]], c=KEYS[1:])
    assert index.longest(SPACE, NAMES) == ("b", 3), "behind a gap nothing counts"
    assert index.longest(SPACE, NAMES[1:]) == ("c", 7)
    assert index.longest(OTHER, NAMES) == ("", 0)


def test_one_fetch_of_so_many_is_verified_and_the_first_is() -> None:
    for every, found in ((0, [False] * 6), (1, [True] * 6), (3, [True, False, False, True, False, False])):
        index = StoreIndex(every)
        assert [index.is_to_verify() for _ in range(6)] == found


def test_the_speed_is_measured_and_forgotten_with_the_store() -> None:
    index = index_of(a=KEYS)
    assert index.seconds_for("a", 1000, 5.0) == 0.0, "it was never measured"
    index.measured("a", 1000, 2.0, 5.0)
    assert index.seconds_for("a", 1000, 5.0) == pytest.approx(2.0)
    index.measured("a", 1500, 1.0, 5.0)
    assert index.seconds_for("a", 1000, 5.0) == pytest.approx(1.0), "1,000 bytes a second, halfway from 500 to 1,500"
    assert index.seconds_for("a", 1000, 5.0 + HALF_LIFE) == pytest.approx(0.5), "it is tried again"
    index.leave("a")
    index.join("a")
    assert index.seconds_for("a", 1000, 5.0) == 0.0


def test_a_store_from_which_nothing_came_is_slow() -> None:
    index = index_of(a=KEYS, b=KEYS)
    index.failed("a", 2.0, 5.0)
    assert index.seconds_for("a", 1, 5.0) >= 2.0, "not a byte came in this time"
    index.measured("b", 1 << 20, 1.0, 5.0)
    index.failed("b", 1e-3, 5.0)
    assert index.seconds_for("b", 1000, 5.0) == pytest.approx(1.0), "at most a byte in a thousandth of a second"
    fast = index_of(c=KEYS)
    fast.measured("c", 400, 1.0, 5.0)
    fast.failed("c", 1e-3, 5.0)
    assert fast.seconds_for("c", 100, 5.0) == pytest.approx(1.0), "a quarter of what it was"
