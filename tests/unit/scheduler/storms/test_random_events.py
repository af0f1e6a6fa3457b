"""Random events, every invariant checked after each, every token compared with its solo run.

PAGEANT_TEST_EVENTS=200000 pytest tests/unit/scheduler/storms/test_random_events.py      the whole, where CI does a part
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.unit.scheduler.worlds.storm import (
    COUNTED,
    TAMPERED,
    StateStorm,
    Storm,
    TamperedStateStorm,
    TamperedStorm,
    TamperedWindowStorm,
    WindowStorm,
)

EVENTS = int(os.environ.get("PAGEANT_TEST_EVENTS", "30000"))
ENOUGH = 30_000  # to see everything
STORM = 3000  # events of each, before it settles
TAMPERED_SHARE = 4  # every so many events one is of a storm whose ledgers go wrong


def rage(kind: type[Storm], num_events: int) -> Counter[str]:
    """Storms of one seed after the other; returns what was seen in them."""
    seen: Counter[str] = Counter()
    done, seed = 0, 0
    while done < num_events:
        storm = kind(seed)
        storm.run(STORM)
        seen += storm.seen
        done += storm.world.num_events
        seed += 1
    return seen


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [Storm, WindowStorm, StateStorm])
def test_nothing_is_lost_and_nothing_is_held_twice(kind: type[Storm]) -> None:
    seen = rage(kind, EVENTS)
    wanted = [
        name for name in COUNTED if name != "num_block_copies" or kind is not StateStorm
    ]  # siblings copy none there
    assert EVENTS < ENOUGH or all(seen[name] for name in wanted), f"the storms were too calm: {seen}"
    assert not any(seen[name] for name in TAMPERED), f"something was reclaimed that was not lost: {seen}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [TamperedStorm, TamperedWindowStorm, TamperedStateStorm])
def test_ledgers_that_go_wrong_are_set_right_and_no_token_is_wrong(kind: type[Storm]) -> None:
    seen = rage(kind, EVENTS // TAMPERED_SHARE)
    assert EVENTS < ENOUGH or all(seen[name] for name in TAMPERED), f"the storms were too calm: {seen}"
