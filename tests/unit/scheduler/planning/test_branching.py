"""When a beam begins where another stands: as soon as there is a row for it, and a block where it copies one."""

from __future__ import annotations

import pytest

from services.scheduler.planning.branching import branch_off
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Status
from tests.unit.scheduler.worlds.timed import Timed


@pytest.mark.parametrize(
    ("num_rows", "num_over", "num_available", "reserve", "branches"),
    [
        (1, 1, 8, 0, False),  # no row is left
        (2, 1, 1, 0, True),
        (2, 1, 0, 0, False),
        (2, 1, 3, 2, True),
        (2, 1, 2, 2, False),  # what is left is reserved
        (2, 0, 0, 0, True),  # nothing is copied
        (2, 0, 2, 2, True),
    ],
)
def test_a_branch_begins_where_there_is_room(
    num_rows: int, num_over: int, num_available: int, reserve: int, branches: bool
) -> None:
    policy = Policy(max_num_batched_tokens=64)
    world = Timed(policy, max_num_seqs=num_rows)
    replica = world.scheduler.replicas["w0"]
    world.acknowledges = False
    world.ask("source", list(range(2 * replica.block_size + num_over)), max_tokens=20)
    world.plan("w0")
    world.ask("branch", list(range(20)), max_tokens=20)
    (source,), (beam,) = replica.running, replica.waiting
    assert source.num_computed_tokens % replica.block_size == num_over
    replica.pool.allocate(replica.pool.num_available - num_available)

    num_copies = branch_off(replica, PlanBuilder(replica, policy, set()), [(beam, source)], reserve)
    assert (beam.status is Status.RUNNING, num_copies) == (branches, int(branches and num_over > 0))
    if branches:
        assert beam.num_computed_tokens == source.num_computed_tokens
        assert beam.block_ids[:2] == source.block_ids[:2] and len(beam.block_ids) == 2 + (num_over > 0)


@pytest.mark.parametrize("windows", [[], [(8, 12)]])  # each a window and its blocks
def test_what_a_branch_copies_is_not_given_out_while_the_plan_is_made(windows: list[tuple[int, int]]) -> None:
    """Also where its source is preempted for another sequence of the same plan."""
    policy = Policy(max_num_batched_tokens=64)
    world = Timed(policy, max_num_seqs=2, sliding=windows)
    replica = world.scheduler.replicas["w0"]
    world.acknowledges = False
    world.ask("source", list(range(2 * replica.block_size + 1)), max_tokens=20)
    world.plan("w0")
    world.ask("branch", list(range(20)), max_tokens=20)
    (source,), (beam,) = replica.running, replica.waiting
    builder = PlanBuilder(replica, policy, set())
    assert branch_off(replica, builder, [(beam, source)], 0) == 1

    copied = [table.block_ids[-1] for table in source.tables]
    assert [pool_copied for pool_copied, _, _ in builder.copies[beam]] == copied
    replica.preempt(source)
    assert all(block not in pool.available for pool, block in zip(replica.pools, copied, strict=True))
    builder.clear()
    assert all(block in pool.available for pool, block in zip(replica.pools, copied, strict=True))
