"""The checks themselves: each names what is wrong where one thing is, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.blocks.clock import Clock
from services.scheduler.invariants import check
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence, Status
from shared.errors import FatalError
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.timed import Timed


class Scene:
    """Two running sequences, with a step in flight; one that waits, and one request that has finished."""

    def __init__(self) -> None:
        self.world = world = Timed(Policy(max_num_batched_tokens=64), max_num_seqs=2)
        world.acknowledges = False
        world.ask("done", [9, 9, 9], max_tokens=1)
        world.run()
        for index in range(3):
            world.ask(f"r{index}", list(range(10 * index, 10 * index + 20)), tenant=f"t{index}", max_tokens=20)
        world.step()
        world.plan("w0")
        self.core: Scheduler = world.scheduler
        self.replica: Replica = self.core.replicas["w0"]
        self.first, self.second = self.replica.running
        (self.waiting,) = self.replica.waiting
        assert self.replica.in_flight and self.core.finished

    @property
    def stranger(self) -> Sequence:
        """A sequence that no request has."""
        request = self.core.requests["r0"]
        return Sequence(request, 7, self.first.rank, [1], status=Status.FINISHED)


def lost_block(s: Scene) -> None:
    s.replica.pool.allocate(1)


def double_free(s: Scene) -> None:
    s.replica.pool._free.extend([next(iter(s.replica.pool.available))])


def free_and_held(s: Scene) -> None:
    block = next(iter(s.replica.pool.available))
    s.first.block_ids[-1] = block


def wrong_count(s: Scene) -> None:
    s.replica.pool.ref_counts[s.first.block_ids[0]] += 1


def table_with_a_block_twice(s: Scene) -> None:
    block = s.first.block_ids[0]
    s.replica.pool.share([block])
    s.first.block_ids.append(block)


def another_life(s: Scene) -> None:
    s.first.block_generations[0] += 1


def wrong_name(s: Scene) -> None:
    s.replica.pool._by_hash[b"nobody"] = 0


def row_twice(s: Scene) -> None:
    s.first.row = s.second.row


def miscounted_rows(s: Scene) -> None:
    s.replica.num_rows["t0"] += 1


def wrong_order(s: Scene) -> None:
    s.replica.running.reverse()


def three_steps(s: Scene) -> None:
    while len(s.replica.in_flight) < 3:
        s.replica.in_flight.append(s.replica.in_flight[0])


def running_that_waits(s: Scene) -> None:
    s.first.status = Status.WAITING


def computed_beyond_its_blocks(s: Scene) -> None:
    s.first.num_computed_tokens = len(s.first.block_ids) * s.replica.block_size + 1


def computed_ahead(s: Scene) -> None:
    s.first.num_computed_tokens = s.first.num_tokens + s.first.num_pending + 1
    assert s.first.num_computed_tokens <= len(s.first.block_ids) * s.replica.block_size


def sample_that_none_computes(s: Scene) -> None:
    s.first.num_pending += 1


def waiting_that_runs(s: Scene) -> None:
    s.waiting.status = Status.RUNNING


def waiting_with_a_block(s: Scene) -> None:
    s.waiting.block_ids.append(0)


def waiting_with_a_row(s: Scene) -> None:
    s.waiting.row = 0


def lost_sequence(s: Scene) -> None:
    s.replica.waiting.remove(s.waiting)


def sequence_in_two_places(s: Scene) -> None:
    s.core.unassigned.append(s.first)


def finished_among_the_open(s: Scene) -> None:
    s.core.requests["done"] = s.core.finished["done"]


def open_among_the_finished(s: Scene) -> None:
    s.core.finished["r0"] = s.core.requests["r0"]


def time_of_nothing(s: Scene) -> None:
    s.core.accounts.sequences[s.stranger] = s.core.accounts.sequences[s.first]


def drafts_of_nothing(s: Scene) -> None:
    s.core.records.add(s.stranger, 1, 1)


def embedding_of_nothing(s: Scene) -> None:
    s.core.outbound.take_embedding(s.stranger, b"")


def beam_that_has_ended(s: Scene) -> None:
    s.core.forks.unsent.add(s.core.finished["done"].sequences[0])


def worker_without_clocks(s: Scene) -> None:
    del s.core.accounts.workers[s.replica]


def gone(s: Scene) -> Replica:
    return Replica("gone", 9, capacity(), s.core.shares, Clock())


def clocks_without_a_worker(s: Scene) -> None:
    s.core.accounts.add_worker(gone(s))


def beam_at_a_worker_that_is_gone(s: Scene) -> None:
    s.core.forks.begin(gone(s), s.first, s.second)


def miscounted_background(s: Scene) -> None:
    s.replica.num_background += 1


def miscounted_waiting_background(s: Scene) -> None:
    s.replica.waiting.num_background += 1


def background_before_others(s: Scene) -> None:
    s.first.request.is_background = True
    s.replica.num_background += 1


def background_beside_others(s: Scene) -> None:
    other = Request(s.first.request.header, s.first.request.params, [1], [], 99)
    other.is_background = True
    s.replica.in_flight[0].sequences.append(Sequence(other, 0, s.first.rank, [1], status=Status.FINISHED))
    s.replica.in_flight[0].num_samples.append(0)


FAULTS: dict[Callable[[Scene], None], str] = {
    lost_block: "held + cached + free",
    double_free: "free list twice",
    free_and_held: "both held and free",
    wrong_count: "reference counts",
    table_with_a_block_twice: "no block twice",
    another_life: "the holder of a block",
    wrong_name: "the hash map",
    row_twice: "each row has one holder",
    miscounted_rows: "each tenant's rows",
    wrong_order: "ordered by rank",
    three_steps: "two steps in flight",
    running_that_waits: "are RUNNING",
    computed_beyond_its_blocks: "computed tokens have blocks",
    computed_ahead: "nothing is computed ahead",
    sample_that_none_computes: "pending counts",
    waiting_that_runs: "are WAITING",
    waiting_with_a_block: "holds nothing",
    waiting_with_a_row: "holds nothing",
    miscounted_background: "running background sequences are counted",
    miscounted_waiting_background: "waiting background sequences are counted",
    background_before_others: "background sequences are the last",
    background_beside_others: "no step has parts of background sequences and of others",
    lost_sequence: "every unfinished sequence is somewhere",
    sequence_in_two_places: "in one place",
    finished_among_the_open: "finished requests are put aside",
    open_among_the_finished: "only finished requests",
    time_of_nothing: "the table of times",
    drafts_of_nothing: "the table of drafts",
    embedding_of_nothing: "what goes out with first tokens",
    beam_that_has_ended: "only beams that are followed",
    worker_without_clocks: "each worker has its clocks",
    clocks_without_a_worker: "each worker has its clocks",
    beam_at_a_worker_that_is_gone: "beams begin at workers that live",
}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    check(Scene().core)


@pytest.mark.parametrize(("fault", "named"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_a_broken_invariant_is_named(fault: Callable[[Scene], None], named: str) -> None:
    scene = Scene()
    fault(scene)
    with pytest.raises(FatalError, match="invariant broken") as found:
        check(scene.core)
    assert named in str(found.value)
