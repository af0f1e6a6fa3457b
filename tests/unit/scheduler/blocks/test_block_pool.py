"""Blocks: conservation, order of reuse, sharing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.free_list import FreeList
from services.scheduler.blocks.prefix_cache import extend_hashes, root_hash
from services.scheduler.blocks.retention import RetainedBlocks, Retention
from services.scheduler.state.sequence import Request, Sequence
from shared.messages import RequestHeader
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams


def test_cached_blocks_outlive_unhashed_ones() -> None:
    """The worked example of the field: two requests over ten blocks of four, sharing their first two."""
    pool = BlockPool(10)
    first = pool.allocate(5)  # 0 1 2 3 full, 4 partial
    for block, name in zip(first[:4], "abcd", strict=True):
        pool.register(block, name.encode(), pool.generations[block])
    pool.share([0, 1])
    second = [0, 1, *pool.allocate(2)]  # 5 full, 6 partial
    pool.register(5, b"e", pool.generations[5])
    pool.release(first)
    pool.release(second)
    assert list(pool.available) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    hits = pool.lookup([b"a", b"b", b"c", b"x", b"d"])
    assert hits == [0, 1, 2]
    pool.share(hits)
    assert pool.allocate(5) == [6, 4, 7, 8, 9]
    assert pool.lookup([b"d"]) == [3], "the cached block survives"


def test_eviction_takes_the_least_recently_used() -> None:
    pool = BlockPool(3)
    for name in (b"a", b"b", b"c"):
        (block,) = pool.allocate(1)
        pool.register(block, name, pool.generations[block])
        pool.release([block])
    hit = pool.lookup([b"a"])
    pool.share(hit)
    pool.release(hit)  # a is now the most recently used
    pool.allocate(1)
    assert pool.num_evictions == 1
    assert not pool.lookup([b"b"])
    assert pool.lookup([b"a"])
    assert pool.lookup([b"c"])


def test_a_second_block_with_the_same_contents_stays_unnamed() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2)
    pool.register(one, b"same", pool.generations[one])
    pool.register(two, b"same", pool.generations[two])
    assert pool.lookup([b"same"]) == [one]
    pool.release([one])
    pool.release([two])
    assert list(pool.available) == [two, one]


@given(st.lists(st.tuples(st.integers(0, 3), st.permutations(range(8)), st.integers(0, 4)), max_size=100))
def test_free_list_is_a_list(operations: list[tuple[int, list[int], int]]) -> None:
    free, model = FreeList(8), list(range(8))
    for kind, items, count in operations:
        absent = [item for item in items if item not in model][:count]
        if kind == 0 and count <= len(model):
            assert free.take(count) == model[:count]
            del model[:count]
        elif kind == 1 and items[0] in model:
            free.remove(items[0])
            model.remove(items[0])
        elif kind == 2:
            free.extend(absent)
            model += absent
        elif kind == 3:
            free.extend_left(absent)
            model[:0] = reversed(absent)
        assert list(free) == model
        assert len(free) == len(model)
        assert [item in free for item in range(8)] == [item in model for item in range(8)]


def test_hashes_name_the_whole_prefix_and_the_salt() -> None:
    def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
        names: list[bytes] = []
        extend_hashes(names, root_hash(salt), tokens, 4)
        return names

    plain = hashes(list(range(10)))
    assert len(plain) == 2, "only full blocks have names"
    assert hashes(list(range(8))) == plain
    assert hashes([9, 1, 2, 3, 4, 5, 6, 7])[1] != plain[1], "a block's name depends on what came before it"
    assert not set(hashes(list(range(8)), "tenant")) & set(plain), "a salt in the root changes every name"
    grown = plain[:1]
    extend_hashes(grown, root_hash(""), list(range(8)), 4)
    assert grown == plain, "names can be extended as tokens come"


def test_a_sequence_names_its_blocks_as_its_tokens_do() -> None:
    request = Request(RequestHeader("r", "g", cache_salt="s"), SamplingParams(), list(range(10)), [], 0)
    sequence = Sequence(request, 0, (0.0, 0, 0), list(range(10)))
    for length in range(10, 30):
        names: list[bytes] = []
        extend_hashes(names, root_hash("s"), list(range(length)), 4)
        assert sequence.hash_blocks(4) == names, "the prompt's from its packed ids, the others as they come"
        assert sequence.admitted(0).token_ids == pack_tokens(range(length))
        sequence.token_ids.append(length)


def test_each_block_size_has_names_of_its_own() -> None:
    request = Request(RequestHeader("r", "g"), SamplingParams(), list(range(70)), [], 0)
    sequence = Sequence(request, 0, (0.0, 0, 0), list(range(70)))
    for size in (16, 32, 16, 64, 32):
        names: list[bytes] = []
        extend_hashes(names, root_hash(""), list(range(70)), size)
        assert sequence.hash_blocks(size) == names, size
    assert not set(sequence.hash_blocks(16)) & set(sequence.hash_blocks(32))


def cached(pool: BlockPool, names: str, retention: Retention | None = None) -> list[int]:
    """Blocks that were filled, named by these letters, and let go of."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name.encode(), pool.generations[block])
    pool.release(blocks, retention)
    return blocks


def known(pool: BlockPool) -> str:
    return "".join(name for name in "abcdefghij" if pool.knows(name.encode()))


def test_retained_blocks_are_given_out_last_and_shared_as_all() -> None:
    pool = BlockPool(6)
    kept = cached(pool, "ab", Retention("t", 60.0))
    cached(pool, "cd")
    assert pool.num_available == pool.num_cached + 2 == 6 and list(pool.available)[-2:] == kept[::-1]
    taken = pool.allocate(4)
    assert known(pool) == "ab"
    pool.share(pool.lookup([b"a"]))
    assert pool.num_available == 1 and pool.agrees(dict.fromkeys((*taken, kept[0]), 1), range(6))
    assert pool.allocate(1) == [kept[1]] and known(pool) == "a"
    assert pool.recount({kept[0]: 1}) == (5, 0) and pool.num_available == 5


def test_a_tenant_retains_no_more_than_its_share() -> None:
    pool = BlockPool(8, weight={"a": 3.0, "b": 1.0}.__getitem__)
    cached(pool, "abcdefg", Retention("a", 60.0))
    cached(pool, "h", Retention("b", 60.0))  # from here on the first has 6 blocks
    pool.allocate(1)
    assert known(pool) == "abcdefh", "the tail of what came first"


def test_retention_ends_with_its_time() -> None:
    clock = Clock()
    pool = BlockPool(4, clock)
    cached(pool, "ab", Retention("t", 60.0))
    clock.now = 61.0
    cached(pool, "cd")
    pool.allocate(2)
    assert known(pool) == "cd"


def test_what_is_retained_no_longer_is_told_once() -> None:
    clock = Clock()
    retained = RetainedBlocks(4, clock, lambda tenant: 1.0)
    assert not retained.add([2, 3], Retention("t", 60.0))
    clock.now = 61.0
    assert retained.expire() == [2, 3]
    assert not retained.expire() and not list(retained) and 2 not in retained


def test_a_tenant_that_has_nothing_cached_takes_no_share() -> None:
    pool = BlockPool(8)
    pool.release(pool.allocate(2), Retention("nothing", 60.0))  # without names
    cached(pool, "abcdef", Retention("t", 60.0))
    cached(pool, "gh")
    pool.allocate(2)
    assert known(pool) == "abcdef", "all retained, and what came later is given out before them"
