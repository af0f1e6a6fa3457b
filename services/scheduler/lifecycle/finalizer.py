"""Ends sequences and requests: they give up what they hold, clients get their ends, and finished requests are kept."""

from __future__ import annotations

from services.scheduler.lifecycle.assignment import ReplicaAssignment
from services.scheduler.lifecycle.side_tables import SideTables
from services.scheduler.speculation.drafts import DraftLinks
from services.scheduler.state.sequence import Request, Sequence, Status
from services.scheduler.telemetry.books import Books
from shared.errors import RequestError

ACKNOWLEDGE_SECONDS = 60.0


class RequestFinalizer:
    """Moves requests from those that are open to those that are finished, or out of both.

    A finished request is kept until its gateway acknowledges it.  One that was dropped is forgotten; the caller has
    informed its client, or the client is gone.
    """

    def __init__(
        self,
        assignment: ReplicaAssignment,
        drafts: DraftLinks,
        tables: SideTables,
        books: Books,
    ) -> None:
        self.open: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self._assignment = assignment
        self._drafts = drafts
        self.tables = tables
        self._books = books

    def finish(self, sequence: Sequence) -> None:
        """A sequence has all its tokens; with the last one its request is finished."""
        self.leave(sequence)
        self._note(sequence)
        if sequence.request.is_finished:
            self._put_aside(sequence.request)

    def conclude(self, request: Request) -> None:
        """A search is over, and its sequences hold nothing any more: send them, for the first time."""
        for sequence in request.sequences:
            self._books.accounts.due(sequence)
            self.tables.outbound.emit(sequence)
            self._note(sequence)
        self._put_aside(request)

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request with a status."""
        so_far = self._books.accounts.so_far(request)
        self._books.journal.request("request_failed", request, code=error.code, reason=str(error), **so_far)
        self.drop(request)
        self.tables.outbound.reject(request.header.gateway, request.request_id, error)

    def drop(self, request: Request) -> None:
        """End a request without a message to its client."""
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self.leave(sequence)
                self.tables.outbound.close(sequence)
        del self.open[request.request_id]
        self.tables.let_go(request)

    def reopen(self, request: Request) -> None:
        """Some of it is generated again."""
        self.finished.pop(request.request_id, None)
        request.finished_time = None
        self.open[request.request_id] = request

    def forget(self, request: Request) -> None:
        """A finished request is not asked for again."""
        del self.finished[request.request_id]
        self.tables.let_go(request)

    def expire(self, now: float) -> None:
        """Forget what was finished long ago, and whose gateway never acknowledged it."""
        for request in list(self.finished.values()):
            request.finished_time = request.finished_time or now
            if now - request.finished_time > ACKNOWLEDGE_SECONDS:
                self.forget(request)

    def leave(self, sequence: Sequence) -> None:
        """A sequence lets go of its row, its blocks and its draft."""
        self._assignment.leave(sequence)
        sequence.status = Status.FINISHED
        self._drafts.forget(sequence)

    def _put_aside(self, request: Request) -> None:
        self._books.counters.num_finished += 1
        self.finished[request.request_id] = self.open.pop(request.request_id)

    def _note(self, sequence: Sequence) -> None:
        self._books.accounts.ended(sequence)
        record = self.tables.records.of(sequence)
        self._books.journal.sequence(
            "sequence_finished",
            sequence,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=max(0, sequence.num_cached_tokens),
            num_preemptions=sequence.num_preemptions,
            num_draft_tokens=record.num_draft_tokens,
            num_accepted_tokens=record.num_accepted_tokens,
        )
