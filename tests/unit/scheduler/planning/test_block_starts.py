"""A prompt that leaves another one within a block begins with a copy of what they share of it."""

from __future__ import annotations

import pytest

from services.scheduler.state.policy import Policy
from shared.tracing.phases import Miss
from tests.unit.scheduler.worlds.timed import Timed
from tests.unit.scheduler.worlds.world import World

SIZE = 8
FIRST = [(7 * i + 3) % 50 for i in range(3 * SIZE)]


def world(**limits: object) -> World:
    policy = Policy(max_num_batched_tokens=64, enable_partial_block_hits=True)
    return World(policy, **{"block_size": SIZE, **limits})  # type: ignore[arg-type]


def num_hits(world: World, prompt: list[int], **options: object) -> int:
    """Tokens of a prompt that are cached, once it has run to its end with the right output."""
    before = world.scheduler.counters.num_prefix_cache_hits
    world.add(f"r{world.num_events}", prompt, **options)  # type: ignore[arg-type]
    world.run()
    world.assert_outputs()
    return world.scheduler.counters.num_prefix_cache_hits - before


@pytest.mark.parametrize(
    ("num_shared", "behind", "num_cached"),
    [
        (SIZE + 5, [49, 49, 49, 49], SIZE + 5),  # in the second block
        (5, [49, 49], 5),  # in the first, which has no hit before it
        (2 * SIZE, [49] * SIZE, 2 * SIZE),  # at the end of a block
        (3 * SIZE, [], 3 * SIZE - 1),  # the same prompt: its last token is computed for its logits
        (SIZE + 1, [], SIZE),  # one token behind a block, which is its last
        (0, [49, 48], 0),
    ],
)
def test_reuse_goes_on_to_the_token(num_shared: int, behind: list[int], num_cached: int) -> None:
    here = world()
    assert num_hits(here, FIRST) == 0
    copies = here.scheduler.counters.num_block_copies
    assert num_hits(here, [*FIRST[:num_shared], *behind]) == num_cached
    assert here.scheduler.counters.num_block_copies - copies == (num_cached % SIZE > 0)


def test_the_longest_of_several() -> None:
    here = world()
    for length in (2, 6, 4):
        num_hits(here, [*FIRST[: SIZE + length], *[40 + length] * (2 * SIZE)])
    assert num_hits(here, [*FIRST[: SIZE + 7], 1, 2]) == SIZE + 6
    assert num_hits(here, [*FIRST[: SIZE + 6], 46, 46, 1]) == 2 * SIZE, "whole blocks come first"


def test_output_is_found_too() -> None:
    """A chat that goes on behind an answer."""
    here = world()
    num_hits(here, FIRST[:20], max_tokens=13)
    answer = here.outputs[next(iter(here.outputs))]
    assert num_hits(here, [*FIRST[:20], *answer[:9], 49, 49]) == 29


def test_not_of_another_tenant_nor_where_all_states_are_needed() -> None:
    here = world()
    num_hits(here, FIRST)
    assert num_hits(here, FIRST[:13], salt="another") == 0
    assert num_hits(here, FIRST[:13], prompt_logprobs=1) == 0
    assert num_hits(here, FIRST[:13]) == 12


@pytest.mark.parametrize("limits", [{"sliding": ((16, 32),)}, {"num_snapshots": 4}])
def test_not_where_layers_have_windows_or_states(limits: dict[str, object]) -> None:
    here = world(**limits)
    num_hits(here, FIRST)
    assert num_hits(here, FIRST[:13]) in (0, SIZE)


def test_off_by_default() -> None:
    here = World(Policy(max_num_batched_tokens=64), block_size=SIZE)
    num_hits(here, FIRST)
    assert num_hits(here, FIRST[:13]) == SIZE
    assert here.scheduler.replicas["w0"].pool.contents is None


def test_a_full_pool_lacks_the_block_to_copy() -> None:
    """Four blocks: the second prompt needs them all, and the one to be copied would have to stay."""
    here = world(num_blocks=4, max_num_seqs=2)
    num_hits(here, FIRST[: 2 * SIZE], max_tokens=1)
    assert num_hits(here, [*FIRST[:12], *[49] * 13], max_tokens=1) == SIZE
    assert num_hits(here, [*FIRST[:12], *[48] * 4], max_tokens=1) == 12


def test_what_is_evicted_is_forgotten() -> None:
    here = world(num_blocks=10)
    num_hits(here, FIRST)
    for number in range(6):
        num_hits(here, [(number + 13 * i) % 50 for i in range(20)])
    pool = here.scheduler.replicas["w0"].pool
    assert pool.contents is not None
    findable = [name for name in pool.hashes if name is not None and pool.knows(name)]
    assert len(pool.contents) == len(findable) <= 10
    assert set(pool.names) < set(findable), "tails are found by their tokens alone"


def test_the_reasons_for_what_is_not_cached_are_counted_in_tokens() -> None:
    here = Timed(Policy(max_num_batched_tokens=128, enable_partial_block_hits=True), block_size=SIZE, max_model_len=128)
    for name, prompt in (("first", FIRST), ("more", [*FIRST[: SIZE + 5], *[49] * (2 * SIZE)])):
        here.ask(name, prompt, max_tokens=2)
        here.run()
    assert here.cached["more"] == SIZE + 5
    assert here.misses("more") == {Miss.NEVER_SEEN: 3 + SIZE, Miss.BELOW_BLOCK: 5}


def test_the_tail_of_a_sequence_that_has_ended() -> None:
    """Its last block is not full, and has a name for copying only: no event, no move, no hit by it."""
    here = world()
    num_hits(here, FIRST[:13], max_tokens=1)
    pool = here.scheduler.replicas["w0"].pool
    assert pool.num_cached == 2
    pool.keep_named()
    pool.name_again()
    assert pool.named is not None
    assert len(pool.named) == 1, "one of the two is whole"
    assert num_hits(here, [*FIRST[:13], 49, 49], max_tokens=1) == 13
    assert num_hits(here, [*FIRST[:11], 49, 49], max_tokens=1) == 11
    assert num_hits(here, FIRST[:13], max_tokens=1) == 12


def test_a_block_that_is_not_full_is_not_offered_to_stores() -> None:
    here = world()
    pool = here.scheduler.replicas["w0"].pool
    pool.keep_named()
    num_hits(here, FIRST[:13], max_tokens=1)
    assert pool.num_cached == 2 and pool.named is not None and len(pool.named) == 1
