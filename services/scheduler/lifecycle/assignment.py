"""Assigns sequences to workers, and places those of a lost worker again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.lifecycle.admission import RETRY_AFTER_MS
from services.scheduler.lifecycle.moves import BlockMoves
from services.scheduler.lifecycle.routing import Router
from services.scheduler.state.forks import Forks
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence, Status
from services.scheduler.telemetry.books import Books
from shared.errors import RejectCode, RequestError
from shared.tracing.phases import Phase


class ReplicaAssignment:
    """The queues of the live workers, and the sequences that wait for a worker to join.

    Invariant: every unfinished sequence is waiting or running at one replica, or `unassigned` while no worker lives
    that has room for it, serves adapters where it has one, and computes the same bits as the one that began it.  A
    worker's successor may be smaller than the one that a request was let in for, and with mixed workers of another
    kind.
    """

    def __init__(
        self,
        policy: Policy,
        replicas: Mapping[str, Replica],
        forks: Forks,
        books: Books,
        moves: BlockMoves,
    ) -> None:
        self.unassigned: list[Sequence] = []
        self._roomless: dict[Request, float] = {}  # for which no worker that lives has room, and since when
        self.router = Router(policy.routing_policy, replicas, moves, use_cache=policy.enable_prefix_caching)
        self._replicas = replicas
        self._books = books
        self._forks = forks

    def queued(self, *, is_background: bool) -> tuple[int, int]:
        """Sequences that wait, in the background or not, and the tokens of those that wait at a worker."""
        num_sequences = sum(sequence.is_background == is_background for sequence in self.unassigned)
        num_tokens = 0
        for queue in (replica.waiting for replica in self._replicas.values()):
            count, tokens = queue.num_background, queue.num_background_tokens
            num_sequences += count if is_background else len(queue) - count
            num_tokens += tokens if is_background else queue.num_tokens - tokens
        return num_sequences, num_tokens

    def place(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences into waiting queues; siblings go where the first of them is."""
        for sequence in sequences:
            placement = self.router.place(sequence)
            if placement is None:
                self.unassigned.append(sequence)
                continue
            self._queue(sequence, placement.replica)
            if placement.then:
                placement.replica.prefills[sequence.request] = placement.then
            if placement.scores:
                self._books.journal.sequence("sequence_placed", sequence, worker=sequence.worker, scores=str(placement))

    def _queue(self, sequence: Sequence, replica: Replica) -> None:
        sequence.worker = replica.instance
        self._books.accounts.queued(sequence, replica)
        replica.waiting.add(sequence)

    # -- from one live worker to another

    def withdraw(self, sequence: Sequence, replica: Replica) -> None:
        """Take a sequence from a worker that stays.  What steps in flight yield for it still counts."""
        if sequence.status is Status.RUNNING:
            self._books.journal.sequence(
                "sequence_handed_over", sequence, worker=replica.instance, num_tokens=sequence.num_tokens
            )
            replica.preempt(sequence)
        else:
            replica.waiting.remove(sequence)
        sequence.worker = ""

    def hand_over(self, sequence: Sequence, source: Replica, target: Replica) -> None:
        """Have a sequence go on at another worker, with what that has of its blocks."""
        self.withdraw(sequence, source)
        self._queue(sequence, target)

    def place_behind(self, beam: Sequence, source: Sequence) -> None:
        """A beam begins where another stands, and runs beside it."""
        replica = self._replicas.get(source.worker)
        beam.worker = source.worker
        if replica is None:
            self.unassigned.append(beam)
            return
        replica.waiting.add(beam)
        self._forks.begin(replica, beam, source)

    def rewrite(self, beam: Sequence) -> None:
        """The last token of a running beam is not the one that its worker took."""
        self._forks.unsent.add(beam)

    def rebalance(self) -> None:
        """A worker has joined: sequences that have not run yet may go there."""
        never_run = [s for r in self._replicas.values() for s in r.waiting if s.num_cached_tokens < 0]
        for sequence in never_run:
            self._replicas[sequence.worker].waiting.remove(sequence)
        self.reassign(never_run)

    def reassign(self, sequences: list[Sequence]) -> None:
        """Place sequences without a worker, the most urgent first."""
        unassigned, self.unassigned = self.unassigned + sequences, []
        self.place(sorted(unassigned, key=lambda s: s.rank))

    def overdue(self, now: float, patience: float) -> list[Request]:
        """Requests for which the workers that live have had no room for longer than `patience` seconds.  To be asked
        again and again; where there is no worker, the next one may be large enough."""
        lacking = dict.fromkeys(sequence.request for sequence in self.unassigned) if self._replicas else {}
        self._roomless = {request: self._roomless.get(request, now) for request in lacking}
        return [request for request, since in self._roomless.items() if now - since > patience]

    def vacate(self, replica: Replica, heard_at: float) -> list[Sequence]:
        """Take all sequences from a worker that is gone, and was last heard of at `heard_at`."""
        self._books.misses.lose(replica)
        self._books.accounts.workers.pop(replica).blame(Phase.LOST, heard_at)
        self._forks.take(replica)
        vacated = replica.waiting.take_all()
        for sequence in list(replica.running):
            self._books.counters.num_preemptions += 1
            self._books.journal.sequence("sequence_preempted", sequence, cause="worker_left", worker=replica.instance)
            replica.preempt(sequence)
            vacated.append(sequence)
        stranded = {sequence for step in replica.in_flight for sequence in step.sequences}
        for sequence in stranded:  # also those that were handed over: no answer comes for them
            sequence.num_pending, sequence.num_in_flight = 0, 0
        for sequence in vacated:
            sequence.worker = ""
            self._books.accounts.lost_worker(sequence, heard_at)
        return vacated

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is."""
        self._forks.forget(sequence)
        if sequence.status is Status.RUNNING:
            self._replicas[sequence.worker].stop(sequence)
        elif sequence in self.unassigned:
            self.unassigned.remove(sequence)
        else:
            self._replicas[sequence.worker].waiting.remove(sequence)


def unplaceable(request: Request, seconds: float) -> RequestError:
    """The error of a request for which no worker was found for so long."""
    text = (
        f"no live worker could serve this request for {seconds:g} s: none has room for its maximum length of "
        f"{request.max_length} tokens, or none has the fingerprint of the worker that began it"
    )
    if request.adapter:
        text += ", or none serves adapters"
    return RequestError(text, code=RejectCode.UNAVAILABLE, retry_after_ms=RETRY_AFTER_MS)
