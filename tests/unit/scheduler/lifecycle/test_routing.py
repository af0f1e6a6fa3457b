"""Routing policies: the field's formulas by hand, and where requests go by them."""

from __future__ import annotations

from collections import Counter

import pytest

from services.scheduler.lifecycle.routing import (
    Router,
    blocks_to_prefill,
    kv_usage,
    least_loaded,
    prefix_aware,
    prefix_cost,
)
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Sequence
from tests.unit.scheduler.worlds.world import World

BLOCK = 8


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + position * 3) % 50 for position in range(length)]


def world(policy: str, workers: int = 3, **limits: int) -> World:
    return World(Policy(max_num_batched_tokens=32, routing_policy=policy), workers=workers, **limits)


def only(world: World, request_id: str) -> Sequence:
    (sequence,) = world.scheduler.requests[request_id].sequences
    return sequence


@pytest.mark.parametrize(("overlap", "held", "cost"), [(2, 10, 18), (5, 5, 10), (8, 9, 11)])
def test_the_prefix_cost_is_dynamo_s_worked_example(overlap: int, held: int, cost: int) -> None:
    assert prefix_cost(0, 10, overlap, held) == cost


def test_a_prompt_that_is_cached_as_a_whole_costs_no_less_than_nothing() -> None:
    assert prefix_cost(0, 10, 12, 3) == 3


def test_round_robin_takes_turns_whatever_the_load() -> None:
    w = world("round_robin")
    for index in range(9):
        w.add(f"r{index}", prompt(8 + 8 * index, index))
    placed = [only(w, f"r{index}").worker for index in range(9)]
    assert placed == ["w0", "w1", "w2"] * 3
    w.run()
    w.assert_outputs()


def test_least_loaded_counts_requests_and_weighs_those_that_wait_as_the_cache_fills() -> None:
    w = world("least_loaded", num_blocks=14, max_num_seqs=3)
    for index in range(3):
        w.add(f"r{index}", prompt(40, index))
    for name in w.workers:
        w.plan(name)
    replica = w.scheduler.replicas["w0"]
    assert len(replica.running) == 1 and not replica.waiting and replica.pool.num_held == 4
    assert least_loaded(only(w, "r0"), replica) == 1
    for index in range(3, 12):
        w.add(f"r{index}", prompt(40, index))
    assert Counter(s.worker for r in w.scheduler.requests.values() for s in r.sequences) == dict.fromkeys(w.workers, 4)
    for name in w.workers:
        w.plan(name)
    usage, waiting = kv_usage(replica), len(replica.waiting)
    assert usage > 0.5 and waiting
    expected = waiting + len(replica.running) + waiting * 6 * (usage - 0.5)
    assert least_loaded(only(w, "r0"), replica) == pytest.approx(expected)
    w.run()
    w.assert_outputs()


def test_a_request_goes_where_its_prefix_is() -> None:
    w = world("prefix_aware")
    w.add("first", prompt(32, 1))
    w.run()
    home = w.scheduler.finished and next(iter(w.scheduler.finished.values())).sequences[0].worker
    w.add("other", prompt(32, 7))
    w.run()
    homes = {name for name, replica in w.scheduler.replicas.items() if replica.num_steps}
    assert len(homes) == 2, "equals take turns"
    w.add("again", [*prompt(32, 1), 5])
    cached = only(w, "again").worker
    replica = w.scheduler.replicas[cached]
    assert len(replica.pool.lookup(only(w, "again").hash_blocks(BLOCK))) == 4, home
    w.run()
    assert w.scheduler.counters.num_prefix_cache_hits == 32
    w.assert_outputs()


def test_a_request_leaves_its_prefix_where_that_worker_is_too_busy() -> None:
    w = world("prefix_aware", workers=2, num_blocks=64, max_model_len=256)
    w.add("first", prompt(16, 1))
    w.run()
    (home,) = (name for name, replica in w.scheduler.replicas.items() if replica.num_steps)
    w.scheduler.replicas[home].waiting.num_tokens += 256  # work that this prefix of 16 tokens does not outweigh
    w.add("again", [*prompt(16, 1), 3])
    assert only(w, "again").worker != home
    w.scheduler.replicas[home].waiting.num_tokens -= 256
    w.run()


def test_blocks_to_prefill_are_those_that_wait_and_the_rest_of_those_that_run() -> None:
    w = world("prefix_aware", workers=1)
    w.add("a", prompt(72, 1))
    w.add("b", prompt(16, 2))
    replica = w.scheduler.replicas["w0"]
    assert blocks_to_prefill(replica) == (72 + 16) / BLOCK
    w.plan("w0")
    assert blocks_to_prefill(replica) == (72 - 32 + 16) / BLOCK
    assert prefix_aware(only(w, "b"), replica) == 10 * (40 + 16 + 16) / BLOCK + replica.pool.num_held
    w.run()
    assert blocks_to_prefill(replica) == 0


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    w = World(Policy(enable_prefix_caching=False, max_num_batched_tokens=32), workers=2)
    w.add("a", prompt(24, 1))
    assert only(w, "a").hashes_by_size == {}
    w.run()
    w.assert_outputs()


def test_siblings_follow_the_first() -> None:
    w = world("round_robin")
    w.add("siblings", prompt(12), n=3, temperature=1.0)
    assert len({sequence.worker for sequence in w.scheduler.requests["siblings"].sequences}) == 1
    w.run()
    w.assert_outputs()


def test_the_choice_is_noted_with_its_scores() -> None:
    w = world("least_loaded")
    w.add("a", prompt(12))
    w.add("b", prompt(12, 1))
    notes = [note.fields for note in w.scheduler.journal.take() if note.event == "sequence_placed"]
    assert [note["worker"] for note in notes] == ["w0", "w1"]
    assert [note["scores"] for note in notes] == ["w0=0 w1=0 w2=0", "w0=1 w1=0 w2=0"]
    w.run()


def test_where_nobody_is_nobody_is_chosen() -> None:
    w = world("prefix_aware", workers=1)
    w.add("a", prompt(12))
    sequence = only(w, "a")
    assert Router("round_robin", {}, w.scheduler.moves).place(sequence) is None
    alone = Router("least_loaded", w.scheduler.replicas, w.scheduler.moves).place(sequence)
    assert alone is not None and alone.replica.instance == "w0" and not alone.scores
    w.run()


def test_a_prefix_whose_window_is_gone_is_no_hit() -> None:
    costs = []
    for sliding in ((), ((16, 30),)):
        w = World(Policy(max_num_batched_tokens=64, routing_policy="prefix_aware"), sliding=sliding)
        replica = w.scheduler.replicas["w0"]
        w.add("r", prompt(40))
        sequence = only(w, "r")
        nothing = prefix_aware(sequence, replica)
        for name in sequence.hash_blocks(BLOCK)[:4]:
            (block,) = replica.pool.allocate(1)
            replica.pool.register(block, name, replica.pool.generations[block])
            replica.pool.release([block])
        costs.append(nothing - prefix_aware(sequence, replica))
    assert costs[0] > 0 and costs[1] == 0


def test_what_is_in_the_background_counts_all_that_is_held() -> None:
    w = World(Policy(max_num_batched_tokens=64))
    w.add("rests", prompt(40), is_background=True, max_tokens=30)
    w.step()
    replica = w.scheduler.replicas["w0"]
    w.add("live", prompt(16, 3))
    w.add("batch", prompt(16, 3), is_background=True)
    assert replica.pool.num_held > 0
    assert prefix_aware(only(w, "batch"), replica) - prefix_aware(only(w, "live"), replica) >= replica.pool.num_held
