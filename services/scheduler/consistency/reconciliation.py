"""Keeps the ledgers of scheduler and worker equal: differences are corrected, counted and logged.

A row that a worker refuses, a leaked block, or a message that was lost with a connection costs the sequences concerned
a recomputation, and other sequences nothing.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict

from services.scheduler.consistency.holdings import Audit, check_report, check_steps, compare, expected
from services.scheduler.consistency.self_check import Mended, check, stale_holders
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence, Status
from services.scheduler.state.step import Step
from services.scheduler.telemetry.books import Books
from shared.messages import Holdings, Refusal, RefusedRow, ReportHoldings, StepResult

MAX_REFUSALS = 3  # of one sequence, before its request ends alone


class Reconciliation:
    """Corrects replicas, and reports that by counters and alarms."""

    def __init__(self, books: Books) -> None:
        self._accounts = books.accounts
        self._counters = books.counters
        self._journal = books.journal
        self._audits: dict[str, Audit] = {}  # by worker
        self._num_refusals: dict[Sequence, int] = {}  # of its row, by a worker

    def _audit(self, replica: Replica) -> Audit:
        audit = self._audits.get(replica.instance)
        if audit is None or audit.epoch != replica.epoch:
            audit = self._audits[replica.instance] = Audit(replica.epoch)
        return audit

    def forget(self, replica: Replica) -> None:
        """A worker has left."""
        self._audits.pop(replica.instance, None)

    # -- the scheduler's own

    def check(self, replica: Replica) -> Mended:
        """Correct pool and rows by the tables, once stale holders have given up what was given to others."""
        stale = stale_holders(replica)
        for sequence in stale:
            self._recompute(replica, sequence)
        mended = check(replica, self._audit(replica), len(stale))
        if mended != Mended():
            self._counters.num_leaked_blocks += mended.num_leaked_blocks
            self._counters.num_leaked_rows += mended.num_leaked_rows
            self._journal.alarm("leak_reclaimed", worker=replica.instance, where="scheduler", **asdict(mended))
        return mended

    def start_over(self, replica: Replica) -> None:
        """What the pool holds may be wrong: it is found no more, and what runs is computed again from its tokens."""
        for sequence in list(replica.running):
            self._recompute(replica, sequence)
        for block, name in enumerate(replica.pool.hashes):
            if name is not None:
                replica.pool.distrust(block, replica.pool.generations[block])

    # -- the worker's

    def ask(self, replica: Replica, unsent: Set[Sequence]) -> ReportHoldings:
        """To be sent behind the plans so far, in none of which those `unsent` had a part yet."""
        unfinished = (entry for entry in self._num_refusals.items() if entry[0].status is not Status.FINISHED)
        self._num_refusals = dict(unfinished)
        audit = self._audit(replica)
        audit.num_reports += 1
        audit.expected = expected(replica, audit.num_reports, unsent)
        return ReportHoldings(replica.epoch, audit.num_reports, replica.num_steps)

    def compare(self, replica: Replica, holdings: Holdings) -> None:
        """Raises StepLost where a message has not come, ProtocolError where the report makes no sense."""
        check_report(replica, holdings)
        check_steps(replica, holdings)
        audit = self._audit(replica)
        before = audit.expected
        if before is None or before.report_id != holdings.report_id:
            return
        audit.expected = None
        difference = compare(replica, before, holdings)
        for sequence in difference.wanting:
            self._recompute(replica, sequence)
        replica.released_rows += [row for row in difference.leaked_rows if row not in replica.released_rows]
        if difference.leaked_rows or difference.wanting:
            self._counters.num_leaked_rows += len(difference.leaked_rows)
            self._journal.alarm(
                "leak_reclaimed",
                worker=replica.instance,
                where="worker",
                num_leaked_rows=len(difference.leaked_rows),
                num_wanting_rows=len(difference.wanting),
            )

    # -- refusals

    def take_refused(self, replica: Replica, step: Step, result: StepResult) -> list[Request]:
        """Have refused rows computed again.  Returns the requests with a row that was refused too often."""
        refused_too_often: list[Request] = []
        for refused in result.refused_rows:
            sequence = step.sequences[refused.entry]
            self._note(replica, sequence, refused)
            for pool, unwritten in zip(replica.pools, (refused.unwritten, *refused.sliding_unwritten), strict=False):
                for block, generation in unwritten:
                    if 0 <= block < pool.size:
                        pool.end_life(block, generation)
            if replica.snapshots is not None:
                for moved in (step.loads, step.saves):
                    if (snapshot := moved.get(sequence)) is not None:
                        replica.snapshots.forget(*snapshot)
            sequence.num_pending -= step.num_samples[refused.entry]
            if sequence.status is Status.RUNNING:
                self._num_refusals[sequence] = self._num_refusals.get(sequence, 0) + 1
                self._recompute(replica, sequence)
            if self._num_refusals.get(sequence, 0) > MAX_REFUSALS and sequence.request not in refused_too_often:
                refused_too_often.append(sequence.request)
        self.check(replica)
        return [request for request in refused_too_often if not request.is_finished]

    def _note(self, replica: Replica, sequence: Sequence, refused: RefusedRow) -> None:
        self._counters.num_refused_rows += 1
        if refused.reason is Refusal.STALE_BLOCK and 0 <= refused.pool < len(replica.pools):
            pool = replica.pools[refused.pool]
            if 0 <= refused.block_id < pool.size:
                pool.distrust(refused.block_id, refused.known)
        self._journal.alarm(
            "row_refused",
            worker=replica.instance,
            request_id=sequence.request.request_id,
            index=sequence.index,
            reason=str(refused.reason),
            pool=refused.pool,
            block_id=refused.block_id,
            generation=refused.generation,
            known=refused.known,
        )

    def _recompute(self, replica: Replica, sequence: Sequence) -> None:
        """By the preemption path and counted as one, though not towards the sequence's protection: blocks sufficed."""
        if sequence.status is Status.RUNNING:
            self._counters.num_preemptions += 1
            self._journal.sequence("sequence_preempted", sequence, cause="ledgers_differ", worker=replica.instance)
            replica.preempt(sequence)
            replica.waiting.add(sequence)
            self._accounts.preempted(sequence)
