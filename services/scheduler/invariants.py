"""What must hold after every event; used by tests and by debug builds, never on the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status, Table
from shared.errors import FatalError


def check(scheduler: Scheduler) -> None:
    """Raise FatalError naming the first invariant that does not hold."""
    for replica in scheduler.replicas.values():
        _check_blocks(replica)
        _check_rows(replica)
        _check_sequences(replica)
        _check_background(replica)
        for sequence in replica.running:
            _check_windows(replica, sequence, scheduler.policy.max_num_batched_tokens)
    _check_places(scheduler)
    _check_side_tables(scheduler)


def _require(holds: bool, what: str, replica: Replica | None = None) -> None:
    if not holds:
        raise FatalError(f"invariant broken{f' at {replica.instance}' if replica else ''}: {what}")


def _check_blocks(replica: Replica) -> None:
    for index, pool in enumerate(replica.pools):
        moving = replica.moves.held if index == 0 else []
        _check_pool(replica, pool, [sequence.tables[index] for sequence in replica.running], moving)
    if replica.snapshots is not None:
        _check_pool(replica, replica.snapshots.pool, [], [])


def _check_pool(replica: Replica, pool: BlockPool, tables: list[Table], moving: list[int]) -> None:
    held = Counter(block for table in tables for block in table.block_ids)
    held.update(moving)
    available = list(pool.available)
    _require(len(available) == len(set(available)) == pool.num_available, "a block is on the free list twice", replica)
    _require(len(held) + len(available) == pool.size, "held + cached + free = total", replica)
    _require(not set(available) & set(held), "no block is both held and free", replica)
    counts = {block: count for block, count in enumerate(pool.ref_counts) if count}
    _require(counts == dict(held), "reference counts equal the entries of live tables and moves", replica)
    for table in tables:
        _require(len(set(table.block_ids)) == len(table.block_ids), "a table has no block twice", replica)
        generations = [pool.generations[block] for block in table.block_ids]
        _require(generations == table.generations, "the holder of a block is the last that it was given to", replica)
    by_hash = {block_hash: block for block, block_hash in enumerate(pool.hashes) if block_hash is not None}
    _require(by_hash == pool._by_hash, "the hash map and the descriptors agree", replica)


def _check_windows(replica: Replica, sequence: Sequence, longest_step: int) -> None:
    for one, table in zip(replica.sliding, sequence.sliding, strict=True):
        computed = sequence.num_computed_tokens
        seen = max(0, computed - one.window + 1)
        _require(table.first * replica.block_size <= seen, "a sequence has its window", replica)
        _require(computed <= table.end * replica.block_size, "computed tokens have blocks in each pool", replica)
        _require(len(table.block_ids) <= one.most_blocks(longest_step), "a sequence has its window only", replica)


def _check_rows(replica: Replica) -> None:
    rows = [sequence.row for sequence in replica.running] + replica.free_rows
    _require(sorted(rows) == list(range(replica.capacity.max_num_seqs)), "each row has one holder or is free", replica)
    holders = Counter(sequence.tenant for sequence in replica.running)
    _require(replica.num_rows == holders, "each tenant's rows are counted", replica)


def _check_sequences(replica: Replica) -> None:
    _require(replica.running == sorted(replica.running, key=lambda s: s.rank), "running is ordered by rank", replica)
    _require(len(replica.in_flight) <= MAX_STEPS_IN_FLIGHT, "at most two steps in flight", replica)
    pending: Counter[Sequence] = Counter()
    for step in replica.in_flight:
        pending.update(s for s, count in zip(step.sequences, step.num_samples, strict=True) if count)
    for sequence in replica.running:
        _require(sequence.status is Status.RUNNING, "running sequences are RUNNING", replica)
        covered = len(sequence.block_ids) * replica.block_size
        _require(sequence.num_computed_tokens <= covered, "computed tokens have blocks", replica)
        _require(
            sequence.num_computed_tokens <= sequence.num_tokens + sequence.num_pending,
            "nothing is computed ahead of its token",
            replica,
        )
        _require(sequence.num_pending == pending[sequence], "pending counts the samples in flight", replica)
    for sequence in replica.waiting:
        _require(sequence.status is Status.WAITING, "waiting sequences are WAITING", replica)
        holds = sequence.block_ids or sequence.sliding
        _require(not holds and sequence.row < 0, "a waiting sequence holds nothing", replica)


def _check_background(replica: Replica) -> None:
    running = [sequence.is_background for sequence in replica.running]
    _require(replica.num_background == sum(running), "running background sequences are counted", replica)
    _require(running == sorted(running), "background sequences are the last", replica)
    waiting = [sequence for sequence in replica.waiting if sequence.is_background]
    _require(replica.waiting.num_background == len(waiting), "waiting background sequences are counted", replica)
    for step in replica.in_flight:
        kinds = {sequence.is_background for sequence in step.sequences}
        _require(len(kinds) < 2, "no step has parts of background sequences and of others", replica)


def _check_places(scheduler: Scheduler) -> None:
    places: Counter[Sequence] = Counter(scheduler.unassigned)
    for replica in scheduler.replicas.values():
        places.update(replica.waiting)
        places.update(replica.running)
    alive = {s for r in scheduler.requests.values() for s in r.sequences if s.status is not Status.FINISHED}
    _require(set(places) == alive, "every unfinished sequence is somewhere, no finished one is")
    _require(all(count == 1 for count in places.values()), "every sequence is in one place")
    _require(all(not r.is_finished for r in scheduler.requests.values()), "finished requests are put aside")
    _require(all(r.is_finished for r in scheduler.finished.values()), "only finished requests are put aside")


def _check_side_tables(scheduler: Scheduler) -> None:
    kept = (*scheduler.requests.values(), *scheduler.finished.values(), *scheduler.parking)
    known = {sequence for request in kept for sequence in request.sequences}
    tables: dict[str, Iterable[Sequence]] = {
        "times": scheduler.accounts.sequences,
        "drafts": scheduler.records.by_sequence,
        "what goes out with first tokens": scheduler.outbound.firsts,
    }
    for name, table in tables.items():
        _require(known.issuperset(table), f"the table of {name} has only sequences that are kept")
    placed = {sequence for sequence in known if sequence.status is not Status.FINISHED}
    _require(placed >= scheduler.forks.unsent, "only beams that are followed have another token than their worker")
    replicas = set(scheduler.replicas.values())
    _require(replicas == set(scheduler.accounts.workers), "each worker has its clocks, and no other has any")
    _require(replicas >= scheduler.forks.replicas, "beams begin at workers that live")
