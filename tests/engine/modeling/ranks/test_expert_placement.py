"""Where experts are put, and the moves that bring them there."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.modeling.ranks.expert_balancer import ExpertBalancer
from engine.modeling.ranks.expert_placement import Held, balance, moves_between, place, rank_loads
from kernels.cpu.binding.ranks import ExpertMove


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], Held]:
    """Loads of experts, and ranks that have them, some of them several."""
    ranks, count = draw(st.integers(2, 5)), draw(st.integers(5, 12))
    loads = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return loads, held_at_random(Random(draw(st.integers(0, 999))), ranks, count, draw(st.integers(0, 6)))


def held_at_random(random: Random, ranks: int, count: int, redundant: int) -> Held:
    held: Held = [set() for _ in range(ranks)]
    for expert in range(count):
        held[(expert if expert < ranks else random.randrange(ranks)) % ranks].add(expert)
    for _ in range(min(redundant, count * (ranks - 1))):
        able = [one for one in held if len(one) < count]
        one = random.choice(able)
        one.add(random.choice([expert for expert in range(count) if expert not in one]))
    return held


@given(placements())
def test_every_expert_has_a_rank_and_no_rank_more_than_before(case: tuple[list[int], Held]) -> None:
    loads, held = case
    target = place(loads, held)
    assert [len(one) for one in target] == [len(one) for one in held]
    assert set().union(*target) == set(range(len(loads)))


@given(placements(), st.integers(0, 999))
def test_moves_lead_there_and_lose_no_expert(case: tuple[list[int], Held], seed: int) -> None:
    loads, held = case
    for target in (place(loads, held), place(Random(seed).sample(range(1000), len(loads)), held)):
        now, steps = [set(one) for one in held], 0
        wanted = sum(len(there - here) for there, here in zip(target, now, strict=True))
        for order in moves_between(held, target):
            assert 1 <= len(order) <= 2
            for move in order:
                assert move.expert in now[move.source] and move.dropped in now[move.target]
                assert move.expert not in now[move.target]
            assert len({(move.target, move.dropped) for move in order}) == len(order)
            for move in order:
                now[move.target].remove(move.dropped)
            for move in order:
                now[move.target].add(move.expert)
            assert set().union(*now) == set(range(len(loads)))
            steps += 1
        assert now == target and steps <= wanted


def test_no_move_where_nothing_is_to_change() -> None:
    assert list(moves_between([{0, 1}, {2, 3}], [{0, 1}, {2, 3}])) == []


class Counted:
    """A mixture of two ranks."""

    def __init__(self, *holders: int) -> None:
        self.holders: NDArray[np.uint64] | None = np.array(holders, np.uint64)
        self.loads = np.zeros(len(holders), np.int64)


def moved(steps: int, *loads: int) -> list[tuple[int, Sequence[ExpertMove]]]:
    """What is ordered in so many steps, in each of which so many rows go to four experts of layer 3; it looks at them
    every ten steps."""
    mixture, orders = Counted(1, 1, 2, 2), []
    balancer = ExpertBalancer([(3, mixture)], 2, 10, lambda *order: orders.append(order))
    for _ in range(steps):
        mixture.loads += loads
        balancer.step()
    return orders


def test_balanced_ranks_move_nothing() -> None:
    assert moved(100, 5, 5, 5, 5) == []
    assert moved(100, 51, 49, 51, 49) == [], "what is won is not worth a move"


def test_what_is_counted_moves_experts_between_two_looks() -> None:
    exchange = [ExpertMove(3, 1, 1, 0), ExpertMove(1, 0, 3, 1)]
    assert moved(10, 60, 50, 10, 0) == []
    assert moved(11, 60, 50, 10, 0) == [(3, exchange)]


def test_heavy_experts_are_spread() -> None:
    held = [{0, 1}, {2, 3}, {4, 5}]
    loads = [90, 80, 70, 1, 2, 3]
    target = place(loads, held)
    assert sorted(max(loads[expert] for expert in one) for one in target) == [70, 80, 90]
    assert balance(loads, held) == pytest.approx(246 / 3 / 170)
    assert balance(loads, target) == pytest.approx(246 / 3 / 91)


def test_the_heaviest_expert_is_there_twice() -> None:
    """Two ranks of three rooms for five experts: without a second copy of expert 0 one rank computes at least 100 of
    130 rows."""
    held, loads = [{0, 1, 2}, {2, 3, 4}], [100, 10, 10, 5, 5]
    target = place(loads, held)
    assert all(0 in one for one in target)
    assert rank_loads(loads, target) == [65, 65]


def test_ranks_without_rows_are_balanced() -> None:
    assert balance([0, 0], [{0}, {1}]) == 1.0
