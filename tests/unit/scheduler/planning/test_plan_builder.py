"""The plan builder: a sequence that it drops from the step leaves no trace in the plan."""

from __future__ import annotations

from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.policy import Policy
from tests.unit.scheduler.worlds.world import World


def test_a_sequence_that_is_dropped_before_the_plan_is_made_has_no_part_in_it() -> None:
    policy = Policy(max_num_batched_tokens=64)
    world = World(policy)
    for index in range(2):
        world.add(f"r{index}", [index, 1, 2], max_tokens=8)
    replica = world.scheduler.replicas["w0"]
    first, second = replica.waiting
    builder = PlanBuilder(replica, policy, set())
    for sequence in (first, second):
        replica.grow(sequence, 1)
        replica.start(sequence)
        builder.admit(sequence, 3)
        builder.copy(sequence, 9, 1, sequence.block_ids[0], 0)
    assert builder.budget == 64 - 6
    builder.drop(first)
    assert builder.budget == 64 - 3
    plan = builder.commit()
    assert [one.request_id for one in plan.admitted] == ["r1"] and plan.rows == [second.row]
    assert plan.num_scheduled_tokens == [3] and plan.new_block_ids == second.block_ids
    assert plan.block_copies == [(9, second.block_ids[0])] and plan.copy_generations == [1]
    assert (first.num_pending, second.num_pending) == (0, 1) and replica.in_flight[-1].num_admitted == 1
    builder.drop(first)
    assert builder.budget == 64 - 3, "it had no part any more"
