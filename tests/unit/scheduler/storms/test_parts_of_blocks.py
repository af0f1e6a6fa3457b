"""Storms in which prefixes are reused to the token: nothing is lost, no token is wrong, and faults put in are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from services.scheduler.blocks import contents
from services.scheduler.blocks.sliding import PrefixHit
from services.scheduler.planning.block_starts import BlockStart, BlockStarts
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from shared.errors import FatalError
from tests.unit.scheduler.worlds.storm import TAMPERED, Storm, TamperedStorm

STORM = 2000  # events
NUM_STORMS = 10
CAUGHT = (AssertionError, FatalError, LookupError)
Fault = Callable[[pytest.MonkeyPatch], None]


class PartsStorm(Storm):
    reuses_parts = True


class TamperedPartsStorm(TamperedStorm, PartsStorm):
    """Ledgers go wrong too."""


def rage(kind: type[Storm], num_storms: int = NUM_STORMS) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_storms):
        storm = kind(seed)
        storm.run(STORM)
        seen += storm.seen
    return seen


@pytest.mark.timeout(600)
def test_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    num_starts, copy = Counter[str](), BlockStarts.copy

    def counted(self: BlockStarts, sequence: Sequence, start: BlockStart, place: int) -> int:
        num_starts["in part" if start.num_tokens else "whole"] += 1
        return copy(self, sequence, start, place)

    monkeypatch.setattr(BlockStarts, "copy", counted)
    seen = rage(PartsStorm)
    assert not any(seen[name] for name in TAMPERED), f"something was reclaimed that was not lost: {seen}"
    assert num_starts["in part"] > 100, f"the storms were too calm: {num_starts}"


@pytest.mark.timeout(600)
def test_ledgers_that_go_wrong_are_set_right() -> None:
    seen = rage(TamperedPartsStorm, 5)
    assert all(seen[name] for name in TAMPERED), f"the storms were too calm: {seen}"


def start_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanBuilder, "copy", lambda *args: None)


def start_too_long(patch: pytest.MonkeyPatch) -> None:
    num_alike = contents.num_alike
    patch.setattr(contents, "num_alike", lambda one, other: min(num_alike(one, other) + 1, len(other) // 4))


def start_given_out_in_the_same_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanBuilder, "hold", lambda self, block, pool=0: None)


def start_held_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanBuilder, "hold", lambda self, block, pool=0: self.replica.pools[pool].share([block]))


def tail_of_more_than_was_computed(patch: pytest.MonkeyPatch) -> None:
    name_tail = Replica._name_tail

    def hasty(self: Replica, sequence: Sequence, known: contents.BlockContents) -> None:
        sequence.num_computed_tokens += 1
        name_tail(self, sequence, known)
        sequence.num_computed_tokens -= 1

    patch.setattr(Replica, "_name_tail", hasty)


def tail_under_another_salt(patch: pytest.MonkeyPatch) -> None:
    learn = contents.BlockContents.learn
    patch.setattr(contents.BlockContents, "learn", lambda self, name, parent, tokens: learn(self, name, b"", tokens))
    longest = contents.BlockContents.longest
    patch.setattr(contents.BlockContents, "longest", lambda self, parent, tokens: longest(self, b"", tokens))


def start_of_what_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contents.BlockContents, "forget", lambda self, name: None)
    find = BlockStarts.find

    def careless(self: BlockStarts, sequence: Sequence, hit: PrefixHit) -> BlockStart:
        pool = self._replica.pool
        known, pool.knows = pool.knows, lambda block_hash: True  # type: ignore[method-assign]
        try:
            return find(self, sequence, hit)
        finally:
            pool.knows = known  # type: ignore[method-assign]

    patch.setattr(BlockStarts, "find", careless)


@pytest.mark.parametrize(
    "fault",
    [
        start_not_copied,
        start_too_long,
        start_given_out_in_the_same_plan,
        start_held_for_ever,
        tail_of_more_than_was_computed,
        tail_under_another_salt,
        start_of_what_is_forgotten,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    try:
        seen = rage(PartsStorm)
    except CAUGHT:
        return
    assert any(seen[name] for name in TAMPERED), "no storm noticed"
