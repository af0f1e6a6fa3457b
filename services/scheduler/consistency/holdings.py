"""Compares what a worker should hold after the plans so far with what it reports."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from services.scheduler.consistency.results import StepLost
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from shared.block_digest import digest_blocks
from shared.errors import ProtocolError
from shared.messages import Holdings


@dataclass(frozen=True, slots=True)
class Expected:
    """As of one report that was asked for, behind the plans before `next_step_id`."""

    report_id: int
    next_step_id: int
    digests: dict[int, int]  # of each running sequence's tables, by row
    holders: dict[int, Sequence]  # of these, the sequences whose rows the worker was sent
    given_up: frozenset[int]  # rows that the next plan releases


@dataclass(slots=True)
class Audit:
    """How far one life of a worker has been checked."""

    epoch: int
    num_reports: int = 0  # reports of its holdings that the worker was asked for
    expected: Expected | None = None  # in the last of them
    next_blocks: list[int] = field(default_factory=list)  # where the next check of the scheduler's own pools goes on
    next_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    leaked_rows: list[int]  # the worker keeps them, although no sequence has them
    wanting: list[Sequence]  # the worker does not have their rows, or has other blocks for them


def digest_of(sequence: Sequence) -> int:
    """Of its blocks in all pools, as a worker reports it."""
    digest = 0
    for table in sequence.tables:
        digest = digest_blocks(table.block_ids, table.generations, digest)
    return digest


def expected(replica: Replica, report_id: int, unsent: Set[Sequence]) -> Expected:
    """`unsent`: sequences whose rows may not be at the worker yet."""
    return Expected(
        report_id,
        replica.num_steps,
        {s.row: digest_of(s) for s in replica.running},
        {s.row: s for s in replica.running if s not in unsent},
        frozenset(replica.released_rows),
    )


def check_steps(replica: Replica, holdings: Holdings) -> None:
    """Raise StepLost where a plan has not arrived at the worker, or an answer not here; both links keep order."""
    if holdings.due_step_id < holdings.next_step_id:
        raise StepLost(f"plan {holdings.due_step_id} has not arrived at worker {replica.instance}")
    if holdings.report_id and replica.in_flight and replica.in_flight[0].step_id < holdings.next_step_id:
        raise StepLost(f"the answer to plan {replica.in_flight[0].step_id} has not arrived from {replica.instance}")


def check_report(replica: Replica, holdings: Holdings) -> None:
    """Raise ProtocolError where it makes no sense."""
    rows = holdings.rows
    if len(rows) != len(holdings.digests) or len(set(rows)) != len(rows):
        raise ProtocolError(f"worker {replica.instance} reports {len(rows)} rows and {len(holdings.digests)} digests")
    if rows and not 0 <= min(rows) <= max(rows) < replica.capacity.max_num_seqs:
        raise ProtocolError(f"worker {replica.instance} reports rows that it does not have")
    if not 0 <= holdings.due_step_id <= replica.num_steps or holdings.next_step_id > replica.num_steps:
        raise ProtocolError(f"worker {replica.instance} reports plans that were not made")


def compare(replica: Replica, before: Expected, holdings: Holdings) -> Difference:
    """What differs, and still matters: rows may have been released and given to others since.

    A report that a plan has overtaken describes another moment, and is ignored.
    """
    if holdings.due_step_id != before.next_step_id:
        return Difference([], [])
    reported = dict(zip(holdings.rows, holdings.digests, strict=True))
    now = {sequence.row for sequence in replica.running}
    leaked = [row for row in reported if row not in before.digests and row not in before.given_up and row not in now]
    wanting = [
        holder
        for row, holder in before.holders.items()
        if reported.get(row) != before.digests[row] and holder.row == row and holder.worker == replica.instance
    ]
    return Difference(leaked, wanting)
