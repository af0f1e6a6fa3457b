"""Why a prefix cache did not have a prompt: each reason made to happen, and named; reasons sum to what was missed."""

from __future__ import annotations

import pytest

from services.scheduler.blocks.name_times import NameTimes
from services.scheduler.state.policy import Policy
from services.scheduler.telemetry.prefix_misses import fingerprints
from shared.tracing.phases import Miss
from tests.unit.scheduler.worlds.timed import Timed

BLOCK = 8


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 50 for i in range(length)]


def world_of(routing_policy: str = "prefix_aware", **limits: int) -> Timed:
    policy = Policy(max_num_batched_tokens=128, routing_policy=routing_policy)
    return Timed(policy, block_size=BLOCK, max_model_len=128, **limits)


def run(world: Timed, request_id: str, tokens: list[int], **params: object) -> dict[Miss, int]:
    """Ask, let it end, and see why what was missed was missed."""
    world.ask(request_id, tokens, **{"max_tokens": 2, **params})  # type: ignore[arg-type]
    world.run()
    counts = world.misses(request_id)
    num_cached = world.cached[request_id]
    assert sum(counts.values()) + num_cached == len(tokens), "the reasons sum to the misses"
    return counts


def test_cached_without_a_state() -> None:
    """A prompt as long as three blocks is not worth a snapshot; the longer one has one behind its sixth."""
    world = world_of(num_snapshots=4)
    assert run(world, "a", prompt(25)) == {Miss.NEVER_SEEN: 24, Miss.BELOW_BLOCK: 1}
    assert run(world, "b", prompt(25)) == {Miss.NO_STATE: 24, Miss.BELOW_BLOCK: 1}
    assert run(world, "c", prompt(49)) == {Miss.NO_STATE: 24, Miss.NEVER_SEEN: 24, Miss.BELOW_BLOCK: 1}
    assert run(world, "d", prompt(49)) == {Miss.BELOW_BLOCK: 1}


def test_never_seen() -> None:
    assert run(world_of(), "a", prompt(33)) == {Miss.NEVER_SEEN: 32, Miss.BELOW_BLOCK: 1}


def test_below_a_block() -> None:
    world = world_of()
    assert run(world, "a", prompt(7)) == {Miss.BELOW_BLOCK: 7}
    assert run(world, "b", prompt(7)) == {Miss.BELOW_BLOCK: 7}, "no cache can hold less than a block"


def test_the_block_of_the_last_token_is_always_computed() -> None:
    world = world_of()
    run(world, "a", prompt(32))
    assert run(world, "b", prompt(32)) == {Miss.BELOW_BLOCK: 8}


def test_evicted_and_how_long_ago() -> None:
    world = world_of(num_blocks=8)
    run(world, "a", prompt(33))
    world.wait(5.0)
    run(world, "other", prompt(60, 1))
    world.wait(2.0)
    assert run(world, "b", prompt(33)) == {Miss.EVICTED: 32, Miss.BELOW_BLOCK: 1}
    assert 2000 <= world.last("b").evicted_ago < 2500


def test_the_tail_was_evicted_and_the_head_is_there() -> None:
    world = world_of(num_blocks=8)
    run(world, "a", prompt(33))
    run(world, "other", prompt(33, 1))
    counts = run(world, "b", prompt(33))
    assert world.cached["b"] > 0
    assert counts == {Miss.EVICTED: 32 - world.cached["b"], Miss.BELOW_BLOCK: 1}


def test_another_worker_has_it() -> None:
    world = world_of("round_robin")
    run(world, "a", prompt(33))
    world.join("w1")
    run(world, "its turn at w0", [1])
    assert run(world, "b", prompt(33)) == {Miss.OTHER_WORKER: 32, Miss.BELOW_BLOCK: 1}


def test_the_worker_that_had_it_is_lost() -> None:
    world = world_of()
    run(world, "a", prompt(33))
    world.lose("w0")
    world.join("w1")
    assert run(world, "b", prompt(33)) == {Miss.WORKER_LOST: 32, Miss.BELOW_BLOCK: 1}


def test_another_tenant_s_cache_has_it() -> None:
    world = world_of()
    run(world, "a", prompt(33), salt="acme")
    assert run(world, "b", prompt(33), salt="beta") == {Miss.SALT: 32, Miss.BELOW_BLOCK: 1}
    assert run(world, "c", prompt(33), salt="beta") == {Miss.BELOW_BLOCK: 1}


def test_a_prefix_that_another_tenant_has_and_a_tail_that_nobody_has() -> None:
    world = world_of()
    run(world, "a", prompt(33))
    tokens = prompt(16) + [49, 7] * 10
    assert run(world, "b", tokens, salt="beta") == {Miss.SALT: 16, Miss.NEVER_SEEN: 16, Miss.BELOW_BLOCK: 4}


def test_the_cache_was_not_asked() -> None:
    world = world_of()
    run(world, "a", prompt(33))
    assert run(world, "b", prompt(33), prompt_logprobs=0) == {Miss.NOT_ASKED: 33}


def test_there_is_no_cache() -> None:
    world = Timed(Policy(max_num_batched_tokens=128, enable_prefix_caching=False), block_size=BLOCK)
    run(world, "a", prompt(33))
    assert run(world, "b", prompt(33)) == {Miss.OFF: 33}


def test_siblings_miss_what_no_cache_could_hold() -> None:
    world = world_of()
    world.ask("a", prompt(33), n=3, max_tokens=2)
    world.run()
    assert world.misses("a", 0) == {Miss.NEVER_SEEN: 32, Miss.BELOW_BLOCK: 1}
    assert world.misses("a", 1) == world.misses("a", 2) == {Miss.BELOW_BLOCK: 1}


def test_a_whole_hit_misses_its_last_token() -> None:
    world = world_of()
    run(world, "a", prompt(33))
    assert run(world, "b", prompt(33)) == {Miss.BELOW_BLOCK: 1}
    assert world.last("b").evicted_ago == -1


def test_ghosts_are_bounded_and_the_latest_stay() -> None:
    evicted = NameTimes(2)
    for time, name in enumerate((b"a", b"b", b"a", b"c"), start=1):
        evicted.note(name, float(time))
    assert evicted.get(b"b") is None
    assert evicted.get(b"a") == 3.0
    assert evicted.get(b"c") == 4.0


@pytest.mark.parametrize("length", [0, 7, 8, 20])
def test_fingerprints_are_of_every_full_prefix(length: int) -> None:
    whole = list(fingerprints(prompt(64), BLOCK))
    assert list(fingerprints(prompt(length), BLOCK)) == whole[: length // BLOCK]
    assert len(set(whole)) == 8
