"""Events of one pool: told once, as long as a block can be found, and in as few pieces as may be."""

from __future__ import annotations

import pytest

from services.scheduler.blocks import pool_events
from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.pool_events import BlocksRemoved, BlocksStored, PoolEvent, PoolEvents

NAMES = [bytes([index]) * 16 for index in range(6)]
TOKENS = list(range(12))


def pool_with_events(size: int = 6) -> tuple[BlockPool, PoolEvents]:
    pool = BlockPool(size)
    pool.events = PoolEvents(2, pool.knows)
    return pool, pool.events


def name(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, one in zip(blocks, names, strict=True):
        pool.register(block, one, pool.generations[block])
    return blocks


def taken(events: PoolEvents) -> list[PoolEvent]:
    pending, events.pending = events.pending, []
    return pending


def stored(first: int, end: int, adapter: str = "") -> BlocksStored:
    parent = NAMES[first - 1] if first else None
    return BlocksStored(NAMES[first:end], parent, TOKENS[2 * first : 2 * end], 2, adapter)


def test_a_block_is_told_when_it_can_be_found_and_its_tokens_are_known_whichever_comes_last() -> None:
    pool, events = pool_with_events()
    events.learn(NAMES, range(2), TOKENS, "")
    assert taken(events) == []
    name(pool, *NAMES[:2])
    assert taken(events) == [stored(0, 2)], "together, since one follows the other"
    name(pool, NAMES[2])
    assert taken(events) == [], "what it holds is not known"
    events.learn(NAMES, range(1, 3), TOKENS, "")
    assert taken(events) == [stored(2, 3)], "the other was told already"


def test_what_follows_on_something_else_or_has_another_adapter_is_told_apart() -> None:
    pool, events = pool_with_events()
    name(pool, *NAMES)
    events.learn(NAMES, range(1), TOKENS, "")
    events.learn(NAMES, range(1, 2), TOKENS, "one")
    events.learn(NAMES, range(2, 3), TOKENS, "one")
    events.learn(NAMES, range(4, 5), TOKENS, "one")
    assert taken(events) == [stored(0, 1), stored(1, 3, "one"), stored(4, 5, "one")]


def test_what_is_evicted_is_told_and_may_be_told_again() -> None:
    pool, events = pool_with_events(2)
    events.learn(NAMES, range(2), TOKENS, "")
    pool.release(name(pool, *NAMES[:2]))
    taken(events)
    blocks = pool.allocate(2)
    assert taken(events) == [BlocksRemoved([NAMES[1], NAMES[0]])]
    pool.release(blocks)
    name(pool, NAMES[0])
    events.learn(NAMES, range(1), TOKENS, "")
    assert taken(events) == [stored(0, 1)]


def test_what_a_check_of_the_ledger_forgets_is_told() -> None:
    pool, events = pool_with_events()
    events.learn(NAMES, range(3), TOKENS, "")
    blocks = name(pool, *NAMES[:3])
    taken(events)
    pool.hashes[blocks[1]] = None
    assert pool.recount(dict.fromkeys(blocks, 1)) == (0, 0)
    assert taken(events) == [BlocksRemoved([NAMES[1]])] and not pool.knows(NAMES[1])
    assert pool.recount(dict.fromkeys(blocks, 1)) == (0, 0) and taken(events) == []


def test_of_blocks_without_end_that_never_can_be_found_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_events, "MAX_KNOWN", 2)
    pool, events = pool_with_events()
    events.learn(NAMES, range(3), TOKENS, "")
    name(pool, *NAMES[:3])
    assert taken(events) == [stored(1, 3)]
