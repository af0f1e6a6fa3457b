"""Ledgers that differ: what is found, what becomes of it, and who hears of it."""

from __future__ import annotations

import pytest

from services.scheduler.consistency import self_check
from services.scheduler.consistency.results import StepLost
from services.scheduler.state.policy import Policy
from services.scheduler.telemetry.journal import Alarm
from shared.errors import ProtocolError, RejectCode
from shared.messages import Holdings, Refusal, RefusedRow, StepResult
from shared.requests.beam import Beam
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.rough_world import RoughWorld
from tests.unit.scheduler.worlds.world import World

PROMPT = list(range(1, 21))


def running(num_requests: int = 2, **limits: int) -> RoughWorld:
    world = RoughWorld(**limits)
    world.was_tampered_with = True
    for index in range(num_requests):
        world.add(f"r{index}", PROMPT[index:], max_tokens=20, seed=index)
    for _ in range(3):
        world.plan("w0")
        world.answer("w0")
    return world


def alarms(world: RoughWorld) -> list[Alarm]:
    return world.scheduler.journal.take_alarms()


def test_nothing_differs_and_nobody_hears_of_it() -> None:
    world = running()
    world.was_tampered_with = False  # an alarm would fail the world
    world.check_ledgers()
    world.ask("w0")
    while world.answer("w0"):
        pass
    world.settle()
    world.assert_outputs()


def test_a_worker_lacks_no_beam_that_it_was_not_sent_yet() -> None:
    """Steps of the background are so short that beams begin in one and have their first part in a later one."""
    world = BeamWorld(Policy(max_num_batched_tokens=64, background_step_tokens=3))
    world.add_beam("wide", PROMPT, Beam(8), is_background=True)
    num_unsent = 0
    while world.plan("w0") is not None:
        num_unsent = max(num_unsent, len(world.scheduler.forks.unsent))
        asked = world.scheduler.ask_holdings("w0")
        world.answer("w0")
        rows, digests = world.workers["w0"].holdings()
        due = asked.next_step_id
        assert world.scheduler.reconcile(Holdings(asked.epoch, asked.report_id, due, due, rows, digests))
    assert num_unsent > 2
    assert not world.scheduler.journal.take_alarms() and not world.scheduler.counters.num_preemptions
    world.assert_outputs("wide")
    world.assert_idle()


def test_a_block_that_nobody_holds_is_free_again() -> None:
    world = running()
    pool = world.scheduler.replicas["w0"].pool
    num_available = pool.num_available
    pool.allocate(2)
    world.scheduler.check_ledgers()
    assert pool.num_available == num_available
    (alarm,) = alarms(world)
    assert alarm.event == "leak_reclaimed" and alarm.fields["num_leaked_blocks"] == 2
    assert world.scheduler.counters.num_leaked_blocks == 2
    world.settle()
    world.assert_outputs()


def test_a_block_that_was_freed_twice_is_held_again() -> None:
    world = running()
    replica = world.scheduler.replicas["w0"]
    replica.pool.release(replica.running[0].block_ids[:1])
    world.is_broken = True
    world.scheduler.check_ledgers()
    assert [alarm.fields["num_lost_blocks"] for alarm in alarms(world)] == [1]
    world.settle()
    world.assert_outputs()


def test_a_block_is_not_found_by_the_hash_of_others_contents() -> None:
    world = running()
    replica = world.scheduler.replicas["w0"]
    pool, block = replica.pool, replica.running[0].block_ids[-1]
    pool._by_hash[b"others"], pool.hashes[block] = block, b"others"
    world.scheduler.check_ledgers()
    assert pool.hashes[block] is None and pool.lookup([b"others"]) == []
    assert [alarm.fields["num_misnamed_blocks"] for alarm in alarms(world)] == [1]


@pytest.mark.parametrize("at_once", [1, 4096])
def test_the_names_of_all_sequences_are_looked_at_in_turn(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few blocks at each check, or of all."""
    monkeypatch.setattr(self_check, "WINDOW", at_once)
    world = running(3)
    replica = world.scheduler.replicas["w0"]
    blocks = [sequence.block_ids[-1] for sequence in replica.running]
    for index, block in enumerate(blocks):
        replica.pool._by_hash[b"others%d" % index] = block
        replica.pool.hashes[block] = b"others%d" % index
    num_wrong = []
    for _ in blocks:
        world.scheduler.check_ledgers()
        num_wrong.append(sum(replica.pool.hashes[block] is not None for block in blocks))
    assert num_wrong == ([2, 1, 0] if at_once == 1 else [0, 0, 0])


def test_a_row_that_the_worker_was_not_told_to_release() -> None:
    world = running()
    world.abort("r0")
    world.scheduler.replicas["w0"].released_rows.clear()
    world.ask("w0")
    while world.answer("w0"):
        pass
    assert world.scheduler.counters.num_leaked_rows == 1
    plan = world.plan("w0")
    assert plan is not None and len(plan.released_rows) == 1
    world.settle()
    world.assert_outputs("r1")


def test_a_row_that_the_worker_has_lost_is_computed_anew() -> None:
    world = running()
    sequence = world.scheduler.replicas["w0"].running[0]
    for pool in world.workers["w0"].fence._pools:
        pool.release(sequence.row)
    world.ask("w0")
    while world.answer("w0"):
        pass
    assert sequence.row < 0
    world.settle()
    world.assert_outputs()


def test_a_plan_that_was_lost_begins_a_new_epoch() -> None:
    world = running()
    world.plan("w0")
    world.links["w0"].clear()
    world.ask("w0")
    world.answer("w0")
    assert world.num_renewed == 1
    assert world.scheduler.counters.num_lost_steps == 1 and world.scheduler.counters.num_worker_losses == 0
    world.settle()
    world.assert_outputs()


def test_an_answer_that_was_lost_begins_a_new_epoch() -> None:
    world = running()
    world.plan("w0")
    while world.work("w0"):
        pass
    world.answers["w0"].clear()
    world.ask("w0")
    world.answer("w0")
    assert world.num_renewed == 1
    world.settle()
    world.assert_outputs()


def test_a_later_answer_says_that_one_is_missing_and_an_earlier_one_nothing() -> None:
    world = running()
    world.plan("w0")
    world.plan("w0")
    first, second = world.scheduler.replicas["w0"].in_flight
    empty = StepResult(world.alive["w0"], first.step_id - 1, [], [])
    assert not world.scheduler.apply("w0", empty)
    with pytest.raises(StepLost):
        world.scheduler.apply("w0", StepResult(world.alive["w0"], second.step_id, [], []))


@pytest.mark.parametrize(
    "report",
    [
        {"rows": [0], "digests": []},
        {"rows": [0, 0], "digests": [1, 1]},
        {"rows": [99], "digests": [1]},
        {"rows": [-1], "digests": [1]},
        {"due_step_id": 999},
        {"next_step_id": 999, "due_step_id": 0},
    ],
)
def test_a_report_that_makes_no_sense_changes_nothing(report: dict[str, list[int]]) -> None:
    world = running()
    epoch, num_steps = world.alive["w0"], world.scheduler.replicas["w0"].num_steps
    fields = {"report_id": 1, "next_step_id": num_steps, "due_step_id": num_steps} | report
    with pytest.raises(ProtocolError):
        world.scheduler.reconcile(Holdings(epoch, **fields))  # type: ignore[arg-type]
    world.settle()
    world.assert_outputs()


def test_who_is_refused_again_and_again_ends_alone() -> None:
    world = running()
    while "r0" in world.scheduler.requests:
        plan = world.plan("w0")
        if plan is None:
            world.answer("w0")
            continue
        (step,) = list(world.scheduler.replicas["w0"].in_flight)[-1:]
        refused = [
            RefusedRow(entry, Refusal.NOT_IN_STEP)
            for entry, sequence in enumerate(step.sequences)
            if sequence.request.request_id == "r0"
        ]
        while len(world.scheduler.replicas["w0"].in_flight) > 1:
            world.answer("w0")
        world.work("w0")
        answer = world.answers["w0"].pop()
        assert isinstance(answer, StepResult)
        world.answers["w0"].append(without_samples_of(answer, refused))
        world.hear("w0")
    assert world.rejected == {"r0": RejectCode.INTERNAL}
    world.settle()
    world.assert_outputs("r1")


def test_the_snapshot_of_a_refused_row_was_never_saved() -> None:
    world = World(Policy(max_num_batched_tokens=64), num_snapshots=4)
    world.add("a", [*PROMPT, *PROMPT, *PROMPT])
    plan = world.plan("w0")
    assert plan is not None and len(plan.state_saves) == 1
    replica = world.scheduler.replicas["w0"]
    (sequence,) = replica.running
    names = sequence.hash_blocks(replica.block_size)
    assert replica.snapshots is not None and replica.snapshots.last(names, len(names)) > 0
    refused = StepResult(plan.epoch, plan.step_id, [0], [], refused_rows=[RefusedRow(0, Refusal.NOT_IN_STEP)])
    assert world.scheduler.apply("w0", refused, world.now)
    assert replica.snapshots.last(names, len(names)) == 0


def without_samples_of(result: StepResult, refused: list[RefusedRow]) -> StepResult:
    entries = {one.entry for one in refused}
    samples = iter(result.sampled_token_ids)
    tokens = [[next(samples) for _ in range(count)] for count in result.num_sampled]
    kept = [[] if entry in entries else some for entry, some in enumerate(tokens)]
    return StepResult(
        result.epoch,
        result.step_id,
        [len(some) for some in kept],
        [token for some in kept for token in some],
        refused_rows=refused,
    )


@pytest.mark.parametrize(
    ("pool_index", "block", "is_known"), [(0, 0, True), (0, 1, True), (0, -1, False), (9, 0, False)]
)
def test_a_block_that_a_worker_knows_in_a_later_life_is_found_by_no_name(
    pool_index: int, block: int, *, is_known: bool
) -> None:
    world = running()
    replica = world.scheduler.replicas["w0"]
    plan = world.plan("w0")
    assert plan is not None
    before = list(replica.pool.generations)
    row = RefusedRow(0, Refusal.STALE_BLOCK, block_id=block, known=70, pool=pool_index)
    while len(replica.in_flight) > 1:
        world.answer("w0")
    world.work("w0")
    answer = world.answers["w0"].pop()
    assert isinstance(answer, StepResult)
    world.answers["w0"].append(without_samples_of(answer, [row]))
    world.hear("w0")
    assert replica.pool.generations[block] == (70 if is_known else before[block])
    world.settle()
    world.assert_outputs()


def test_the_names_of_free_blocks_are_looked_at_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "WINDOW", 2)
    world = running()
    pool = world.scheduler.replicas["w0"].pool
    blocks = pool.allocate(8)
    free = one, two = blocks[-2:]
    for block, name in zip(free, (b"one", b"two"), strict=True):
        pool.register(block, name, pool.generations[block])
    pool.release(blocks)
    pool.hashes[one], pool.hashes[two] = pool.hashes[two], pool.hashes[one]
    for _ in range(pool.size // 2 + 1):
        world.scheduler.check_ledgers()
    assert [pool.lookup([name]) for name in (b"one", b"two")] == [[], []]
