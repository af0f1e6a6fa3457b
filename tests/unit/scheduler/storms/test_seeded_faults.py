"""Faults put into the code, one at a time: the storms must find each of them, or they are worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest

from engine.execution.tables.block_fence import BlockFence, PoolFence
from engine.execution.tables.row_states import Ints, RowStates
from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.sliding import SlidingBlocks
from services.scheduler.blocks.snapshots import Snapshot, Snapshots
from services.scheduler.consistency import reconciliation
from services.scheduler.consistency.self_check import Mended
from services.scheduler.lifecycle import intake
from services.scheduler.lifecycle import step_results as answers
from services.scheduler.lifecycle.side_tables import SideTables
from services.scheduler.planning import batching, block_budget, forking
from services.scheduler.planning.checkpoints import Checkpoints
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.planning.preemption import Preemption
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.queues import WaitingQueue
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence as SequenceState
from services.scheduler.state.sequence import Status
from services.scheduler.state.step import Step
from services.worker.plans.plan_sequencer import PlanSequencer, Work
from shared.errors import FatalError
from shared.messages import SlidingPlan, StepPlan, StepResult
from tests.unit.scheduler.worlds.storm import (
    StateStorm,
    Storm,
    TamperedStateStorm,
    TamperedStorm,
    TamperedWindowStorm,
    WindowStorm,
)

CAUGHT = (AssertionError, FatalError, LookupError)  # the last: a row or a place in a table that does not exist
MAX_STORMS = 40
EVENTS = 1500

Fault = Callable[[pytest.MonkeyPatch], None]


def double_free(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def twice(self: BlockPool, blocks: Sequence[int], *retention: Any) -> None:
        release(self, blocks, *retention)
        release(self, blocks[-1:], *retention)

    patch.setattr(BlockPool, "release", twice)


def forgotten_release(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks, *retention: release(self, blocks[:-1], *retention))


def forgotten_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "take_released_rows", lambda self: self.released_rows.clear() or [])


def generation_not_bumped(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def same(self: BlockPool, count: int) -> list[int]:
        before = self.generations[:]
        blocks = allocate(self, count)
        self.generations = [generation or 1 for generation in before]
        return blocks

    patch.setattr(BlockPool, "allocate", same)


def hash_kept_at_reuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


def fork_without_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanBuilder, "copy", lambda self, sequence, source, generation, destination, pool: None)


def hashes_of_another_block_size(patch: pytest.MonkeyPatch) -> None:
    hash_blocks = SequenceState.hash_blocks

    def first_size(self: SequenceState, block_size: int) -> list[bytes]:
        hashes = hash_blocks(self, next(iter(self.hashes_by_size), block_size))
        return hashes[: len(self.token_ids) // block_size]

    patch.setattr(SequenceState, "hash_blocks", first_size)


def stale_epoch_accepted_by_the_scheduler(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def any_epoch(self: Scheduler, instance: str, result: StepResult, now: float = 0.0) -> bool:
        replica = self.replicas.get(instance)
        epoch = replica.epoch if replica is not None else result.epoch
        return apply(self, instance, msgspec.structs.replace(result, epoch=epoch), now)

    patch.setattr(Scheduler, "apply", any_epoch)


def stale_epoch_accepted_by_the_worker(patch: pytest.MonkeyPatch) -> None:
    take = PlanSequencer.take
    patch.setattr(
        PlanSequencer,
        "take",
        lambda self, work: take(self, msgspec.structs.replace(work, epoch=max(work.epoch, self._epoch))),
    )


def duplicate_result_applied_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(answers, "check_order", lambda replica, step_id: bool(replica.in_flight))


def duplicate_plan_run_twice(patch: pytest.MonkeyPatch) -> None:
    def take(self: PlanSequencer, work: Work) -> Any:
        if isinstance(work, StepPlan) and work.epoch == self._epoch:
            self._due_step_id = work.step_id
        return honest(self, work)

    honest = PlanSequencer.take
    patch.setattr(PlanSequencer, "take", take)


def lost_plan_passed_over(patch: pytest.MonkeyPatch) -> None:
    def take(self: PlanSequencer, work: Work) -> Any:
        if isinstance(work, StepPlan) and work.epoch == self._epoch:
            self._due_step_id = max(self._due_step_id, work.step_id)
        return honest(self, work)

    honest = PlanSequencer.take
    patch.setattr(PlanSequencer, "take", take)


def lost_message_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconciliation, "check_steps", lambda replica, holdings: None)


def abort_forgotten(patch: pytest.MonkeyPatch) -> None:
    abort = Scheduler.abort

    def forgetful(self: Scheduler, request_id: str, gateway: str = "") -> bool:
        return request_id in self.requests or abort(self, request_id, gateway)

    patch.setattr(Scheduler, "abort", forgetful)


def release_not_undone_at_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Replica.preempt

    def keep(self: Replica, sequence: Any) -> None:
        blocks = list(sequence.block_ids)
        preempt(self, sequence)
        self.pool.share(blocks[:1])

    patch.setattr(Replica, "preempt", keep)


def side_tables_keep_what_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideTables, "forget", lambda self, sequence: None)


def skipped_fence(patch: pytest.MonkeyPatch) -> None:
    read = BlockFence.read
    patch.setattr(BlockFence, "read", lambda self, plan: read(self, plan) and [])


def unwritten_taken_for_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolFence, "end_lives", lambda self, row, num_computed, num_scheduled: [])


def refused_row_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconciliation.Reconciliation, "_recompute", lambda self, replica, sequence: None)


def leak_not_reclaimed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconciliation, "check", lambda replica, audit, num_stale_holders=0: Mended())


def window_left_too_early(patch: pytest.MonkeyPatch) -> None:
    first_place = SlidingBlocks.first_place
    patch.setattr(SlidingBlocks, "first_place", lambda self, num_computed: first_place(self, num_computed + 8))


def window_never_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingBlocks, "slide", lambda self, table, num_computed: None)


def windows_kept_by_what_stops(patch: pytest.MonkeyPatch) -> None:
    stop = Replica.stop

    def keep(self: Replica, sequence: SequenceState) -> None:
        tables = [list(table.block_ids) for table in sequence.sliding]
        stop(self, sequence)
        for one, blocks in zip(self.sliding, tables, strict=True):
            one.pool.share(blocks[:1])

    patch.setattr(Replica, "stop", keep)


def hit_without_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingBlocks, "last_gap", lambda self, names, end: -1)


def sibling_shares_a_window_that_is_left(patch: pytest.MonkeyPatch) -> None:
    for module in (batching, block_budget):
        patch.setattr(module, "can_fork", lambda replica, sequence: can_share(replica, sequence))


def can_share(replica: Replica, sequence: SequenceState) -> bool:
    parent = sequence.parent
    runs = parent.status is Status.RUNNING and not parent.is_prefilling and not sequence.is_protected
    return runs and forking._can_share(replica, sequence)


def told_otherwise(patch: pytest.MonkeyPatch, **changes: Callable[[SlidingPlan], Any]) -> None:
    """What the worker is told of windows is changed on the way into the plan."""
    build = PlanBuilder._build_sliding

    def other(self: PlanBuilder) -> list[SlidingPlan]:
        plans = build(self)
        return [msgspec.structs.replace(one, **{name: of(one) for name, of in changes.items()}) for one in plans]

    patch.setattr(PlanBuilder, "_build_sliding", other)


def worker_not_told_what_leaves(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, num_left_blocks=lambda plan: [0] * len(plan.num_left_blocks))


def fork_without_copy_in_windows(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, block_copies=lambda plan: [], copy_generations=lambda plan: [])


def window_of_another_generation(patch: pytest.MonkeyPatch) -> None:
    told_otherwise(patch, new_block_generations=lambda plan: [one - 1 for one in plan.new_block_generations])


def window_fence_skipped(patch: pytest.MonkeyPatch) -> None:
    read = BlockFence.read
    patch.setattr(BlockFence, "read", lambda self, plan: [one for one in read(self, plan) if one.pool < 1])


def leak_in_a_window_not_reclaimed(patch: pytest.MonkeyPatch) -> None:
    recount = BlockPool.recount

    def first_only(self: BlockPool, held: Any) -> tuple[int, int]:
        return (0, 0) if any(self is pool for pool in pools) else recount(self, held)

    init = SlidingBlocks.__init__

    def noted(self: SlidingBlocks, *args: Any) -> None:
        init(self, *args)
        pools.append(self.pool)

    pools: list[BlockPool] = []
    patch.setattr(SlidingBlocks, "__init__", noted)
    patch.setattr(BlockPool, "recount", first_only)


def snapshot_under_another_name(patch: pytest.MonkeyPatch) -> None:
    """Wherever a step ends, though the state has not seen the whole block, or more than it."""
    marked = Prefixes.marked

    def anywhere(self: Prefixes, step: Step) -> list[tuple[SequenceState, bytes]]:
        columns = zip(step.sequences, step.num_computed, step.num_scheduled, strict=True)
        self._marks = {one: computed + count for one, computed, count in columns if one in self._marks}
        return marked(self, step)

    def early(self: Checkpoints, sequence: SequenceState, num_computed: int, num_tokens: int) -> int:
        cut_at = cut(self, sequence, num_computed, num_tokens)
        return cut_at - (cut_at > 1 and cut_at < num_tokens)

    cut = Checkpoints.cut
    patch.setattr(Prefixes, "marked", anywhere)
    patch.setattr(Checkpoints, "cut", early)


def snapshot_of_another_generation(patch: pytest.MonkeyPatch) -> None:
    use = Snapshots.use
    patch.setattr(Snapshots, "use", lambda self, name: (use(self, name)[0], use(self, name)[1] - 1))


def state_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpoints, "load", lambda self, sequence, num_blocks: None)


def hit_without_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "last", lambda self, names, end: end)
    patch.setattr(Snapshots, "use", lambda self, name: (0, self.pool.generations[0]))


def snapshot_held_for_ever(patch: pytest.MonkeyPatch) -> None:
    def held(self: Snapshots, name: bytes) -> Snapshot:
        (found,) = self.pool.lookup([name])
        self.pool.share([found])
        return found, self.pool.hash_generations[found]

    patch.setattr(Snapshots, "use", held)


def sibling_shares_a_state(patch: pytest.MonkeyPatch) -> None:
    for module in (batching, block_budget):
        patch.setattr(module, "can_fork", lambda replica, sequence: can_share(replica, sequence))


def state_not_put_back(patch: pytest.MonkeyPatch) -> None:
    def only_counted(self: RowStates, rows: Ints, due: Ints) -> None:
        self._seen[rows] = self._due[rows] = due

    patch.setattr(RowStates, "put_back", only_counted)


def state_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowStates, "keep", lambda self, rows, computed: self._kept.__setitem__(rows, computed))


def tokens_behind_a_state_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowStates, "behind", lambda self, rows, computed: 0 * computed)


def snapshot_of_any_life_loaded(patch: pytest.MonkeyPatch) -> None:
    begin = RowStates.begin

    def trusting(self: RowStates, plan: StepPlan) -> None:
        for _, snapshot, generation in plan.state_loads:
            self._lives[snapshot] = generation
        begin(self, plan)

    patch.setattr(RowStates, "begin", trusting)


def leaked_snapshot_not_reclaimed(patch: pytest.MonkeyPatch) -> None:
    recount = BlockPool.recount

    def held_only(self: BlockPool, held: Any) -> tuple[int, int]:
        return recount(self, held) if held else (0, 0)

    patch.setattr(BlockPool, "recount", held_only)


def background_does_not_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "has_foreground", property(lambda self: not self.running and not self.waiting))


def background_does_not_give_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Preemption, "take_from_resting", lambda self: False)


def background_counted_that_has_left(patch: pytest.MonkeyPatch) -> None:
    remove = WaitingQueue.remove

    def forgetful(self: WaitingQueue, sequence: SequenceState) -> None:
        remove(self, sequence)
        self.num_background += sequence.is_background

    patch.setattr(WaitingQueue, "remove", forgetful)


def background_ranks_as_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "BEHIND_ALL", 0.0)


def background_steps_as_long_as_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "is_in_background", property(lambda self: False))


IN_ANY_STORM: Iterable[Fault] = (
    double_free,
    forgotten_release,
    forgotten_row,
    generation_not_bumped,
    hash_kept_at_reuse,
    fork_without_copy,
    hashes_of_another_block_size,
    stale_epoch_accepted_by_the_scheduler,
    stale_epoch_accepted_by_the_worker,
    duplicate_result_applied_twice,
    duplicate_plan_run_twice,
    lost_plan_passed_over,
    lost_message_not_noticed,
    abort_forgotten,
    release_not_undone_at_preemption,
    side_tables_keep_what_is_over,
    background_does_not_rest,
    background_does_not_give_way,
    background_counted_that_has_left,
    background_ranks_as_others,
    background_steps_as_long_as_others,
)
WITH_WINDOWS: Iterable[Fault] = (
    window_left_too_early,
    window_never_left,
    windows_kept_by_what_stops,
    hit_without_its_window,
    sibling_shares_a_window_that_is_left,
    worker_not_told_what_leaves,
    fork_without_copy_in_windows,
    window_of_another_generation,
)
WHERE_LEDGERS_OF_WINDOWS_GO_WRONG: Iterable[Fault] = (
    window_fence_skipped,
    leak_in_a_window_not_reclaimed,
)
# There a sibling copies no block, and what moves to larger blocks is too short for a snapshot.
ALSO_WITH_STATES = [fault for fault in IN_ANY_STORM if fault not in (fork_without_copy, hashes_of_another_block_size)]
WITH_STATES: Iterable[Fault] = (
    snapshot_under_another_name,
    snapshot_of_another_generation,
    state_not_loaded,
    hit_without_a_snapshot,
    snapshot_held_for_ever,
    sibling_shares_a_state,
    state_not_put_back,
    state_not_kept,
    tokens_behind_a_state_not_computed_again,
)
WHERE_LEDGERS_OF_STATES_GO_WRONG: Iterable[Fault] = (
    snapshot_of_any_life_loaded,
    leaked_snapshot_not_reclaimed,
)
WHERE_LEDGERS_GO_WRONG: Iterable[Fault] = (
    skipped_fence,
    unwritten_taken_for_written,
    refused_row_goes_on,
    leak_not_reclaimed,
)


def events_until_caught(kind: type[Storm], num_storms: int = MAX_STORMS) -> int:
    """Over storms of the first seeds; 0 where none of them notices."""
    num_events = 0
    for seed in range(num_storms):
        storm = kind(seed)
        storm.roughness = max(storm.roughness, 0.01)
        try:
            storm.run(EVENTS)
        except CAUGHT:
            return num_events + storm.world.num_events
        num_events += storm.world.num_events
    return 0


@pytest.mark.parametrize("fault", IN_ANY_STORM, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(Storm), "no storm noticed"


@pytest.mark.parametrize("fault", WHERE_LEDGERS_GO_WRONG, ids=lambda fault: fault.__name__)
def test_a_fault_of_what_sets_ledgers_right_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(TamperedStorm), "no storm noticed"


@pytest.mark.parametrize("fault", [*IN_ANY_STORM, *WITH_WINDOWS], ids=lambda fault: fault.__name__)
def test_a_fault_is_found_where_layers_see_windows(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(WindowStorm), "no storm noticed"


@pytest.mark.parametrize(
    "fault", [*WHERE_LEDGERS_GO_WRONG, *WHERE_LEDGERS_OF_WINDOWS_GO_WRONG], ids=lambda fault: fault.__name__
)
def test_a_fault_of_what_sets_ledgers_of_windows_right_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(TamperedWindowStorm), "no storm noticed"


@pytest.mark.parametrize("fault", [*ALSO_WITH_STATES, *WITH_STATES], ids=lambda fault: fault.__name__)
def test_a_fault_is_found_where_states_are_kept(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(StateStorm), "no storm noticed"


@pytest.mark.parametrize("fault", WHERE_LEDGERS_OF_STATES_GO_WRONG, ids=lambda fault: fault.__name__)
def test_a_fault_of_what_sets_ledgers_of_states_right_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(TamperedStateStorm), "no storm noticed"


def test_without_a_fault_there_is_nothing_to_find() -> None:
    """Storms without tampering run in test_random_events."""
    for kind in (TamperedStorm, TamperedWindowStorm, TamperedStateStorm):
        assert events_until_caught(kind, 2) == 0
