"""The scheduler's core: events in, plans and outputs out; plain synchronous Python over plain data.

add, abort, stop_matched, stream_lost, expire      requests come and go
add_worker, lose_worker, set_detokenizers,
add_draft, lose_draft                              workers, detokenizers and drafts come and go
schedule(worker, now) -> StepPlan | None           the next step, at most two in flight
apply(worker, StepResult, now)                     what a step yielded
ask_holdings, reconcile, check_ledgers             whether the ledgers of scheduler and workers agree
propose(DraftProposals)                            the draft tokens that a draft proposes

`now` is one clock's time in seconds, Unix time where requests carry latency breakdowns; a call without it happens at
the time of the call before.  Decisions depend on it in ageing, in deadlines, in waiting for drafts
or for room, and in moving and keeping blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.scheduler.blocks.clock import Clock
from services.scheduler.consistency.reconciliation import Reconciliation
from services.scheduler.lifecycle.adapters import Adapters
from services.scheduler.lifecycle.assignment import ReplicaAssignment, unplaceable
from services.scheduler.lifecycle.finalizer import RequestFinalizer
from services.scheduler.lifecycle.handovers import Handovers
from services.scheduler.lifecycle.intake import RequestIntake
from services.scheduler.lifecycle.moves import BlockMoves
from services.scheduler.lifecycle.outputs import Outbound
from services.scheduler.lifecycle.parking import Parking, is_later_call
from services.scheduler.lifecycle.resumption import begin_again
from services.scheduler.lifecycle.side_tables import SideTables
from services.scheduler.lifecycle.step_results import StepResultProcessor
from services.scheduler.planning.batching import Batcher
from services.scheduler.planning.quarantine import WorkerDeaths, deadly
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.drafts import DraftLinks
from services.scheduler.speculation.records import DraftRecords
from services.scheduler.state.counters import Counters
from services.scheduler.state.fairness import MAX_TENANTS, Shares, parse_weights
from services.scheduler.state.forks import Forks
from services.scheduler.state.phases import TimeAccounts
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.telemetry.books import Books
from services.scheduler.telemetry.journal import EventJournal
from services.scheduler.telemetry.kv_events import KVEvents
from services.scheduler.telemetry.prefix_misses import PrefixMissDiagnostics
from shared.errors import RejectCode, RequestError
from shared.messages import (
    AddRequest,
    AttachRequest,
    DraftCapacity,
    DraftProposals,
    DraftUpdate,
    Holdings,
    ReportHoldings,
    StepPlan,
    StepResult,
    StopMatched,
    StreamLost,
    WorkerCapacity,
)
from shared.transport.sharding import pick

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """All hard state of a deployment.

    A finished request holds no row and no block; its tokens are kept until its gateway says that it is done with it,
    because a detokenizer may die with the end of a stream in hand.

    Invariant (checked by services.scheduler.invariants): every unfinished sequence is in exactly one place: the
    waiting queue or the running list of one replica, or `unassigned` while no worker lives that has room for it.
    """

    def __init__(self, policy: Policy, journal: EventJournal | None = None, outbound: Outbound | None = None) -> None:
        self.policy = policy
        self.replicas: dict[str, Replica] = {}
        self.clock = Clock()
        self.accounts = TimeAccounts(self.clock)
        self.records = DraftRecords()
        self.outbound = outbound or Outbound(self.accounts, self.records)
        self.forks = Forks()
        self.counters = Counters()
        self.shares = Shares(parse_weights(policy.tenant_weights))
        self.journal = journal or EventJournal(self.clock)
        self.misses = PrefixMissDiagnostics(self.replicas, self.clock)
        rejection, num_drafts = policy.acceptance == "rejection", 2 * policy.max_num_draft_tokens + 1
        self.drafts = DraftLinks(self.counters, rejection=rejection, max_draft_tokens=num_drafts)
        self._books = books = Books(self.counters, self.journal, self.misses, self.shares, self.accounts)
        tables = SideTables(self.accounts, self.records, self.outbound)
        self.parking = Parking(tables)  # requests whose clients are gone, and may come back
        self.intake = RequestIntake(policy, self.replicas)
        self._reconciliation = reconciler = Reconciliation(books)
        self.moves = BlockMoves(self.replicas, self.journal, reconciler.start_over, self.clock, policy.verify_fetches)
        self._assignment = assignment = ReplicaAssignment(policy, self.replicas, self.forks, books, self.moves)
        self.handovers = Handovers(policy, self.replicas, assignment, self.moves)
        self._drafting = drafting = Drafting(policy, self.counters, self.drafts, self.records, self.replicas)
        self._finalizer = finalizer = RequestFinalizer(assignment, self.drafts, tables, books)
        self.requests = finalizer.open  # by id
        self.finished = finalizer.finished  # by id, until their gateways say that their clients have everything
        self._step_results = StepResultProcessor(finalizer, assignment, drafting, reconciler, books)
        self.adapters = Adapters(self.replicas, finalizer.open, self.outbound, finalizer.fail)
        self.events = KVEvents()
        self.deaths = WorkerDeaths()
        self._batchers: dict[str, Batcher] = {}  # by worker; each lives as long as its replica
        self._detokenizers: list[str] = []

    @property
    def is_alive(self) -> bool:
        """Whether there are requests that may still be given output."""
        return bool(self.requests or len(self.parking))

    @property
    def unassigned(self) -> list[Sequence]:
        """Sequences without a worker: none lives that has room for them, or none of the kind that began them."""
        return self._assignment.unassigned

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the background."""
        return self._assignment.queued(is_background=False)[0]

    # -- requests

    def add(self, message: AddRequest, now: float) -> None:
        """Take a request in, or refuse it with a status.

        A request_id that is already here is a replay: ignored, unless its client asks for it again, in a later call.
        """
        self.clock.now = now
        request_id = message.header.request_id
        if known := self.requests.get(request_id) or self.finished.get(request_id) or self.parking.get(request_id):
            header = message.header
            if self.parking.get(request_id) is known or is_later_call(header, known.header):
                self.attach(AttachRequest(request_id, header.gateway, header.deadline, message.latency), now)
            return
        try:
            queued = self._assignment.queued(is_background=message.header.is_background)
            request = self.intake.accept(message, has_detokenizers=bool(self._detokenizers), queued=queued, now=now)
        except RequestError as error:
            self.counters.num_rejected += 1
            self.outbound.reject(message.header.gateway, request_id, error)
            return
        request.detokenizer = pick(request_id, self._detokenizers) or ""
        self.accounts.track(request.sequences, message.latency)
        self.requests[request_id] = request
        self.counters.num_prompt_tokens += request.num_prompt_tokens
        self.journal.request("request_queued", request, **request.described)
        self._assignment.place(request.unfinished)

    def attach(self, message: AttachRequest, now: float | None = None) -> None:
        """The client of a kept request has come back, through this gateway: send it all output, and go on."""
        self.clock.now = self.clock.now if now is None else now
        request = self.requests.get(message.request_id) or self.finished.get(message.request_id)
        parked = self.parking.take(message.request_id) if request is None else None
        if (request := request or parked) is None:
            error = RequestError("no such request is kept", field="idempotency_key", code=RejectCode.NOT_FOUND)
            self.outbound.reject(message.gateway, message.request_id, error)
            return
        self.accounts.track(request.sequences, message.latency)
        again = begin_again(request)
        if parked is not None or again:
            self._finalizer.reopen(request)
            self._assignment.place(again if parked is None else request.unfinished)
        request.header = msgspec.structs.replace(request.header, gateway=message.gateway, deadline=message.deadline)
        request.is_gathered = False  # whether the new call reads it at its end is not known
        if request.detokenizer not in self._detokenizers:
            request.detokenizer = pick(request.request_id, self._detokenizers) or ""
        self.journal.request("request_attached", request)
        self.outbound.emit_again(request)

    def abort(self, request_id: str, gateway: str = "", *, has_everything: bool = False) -> bool:
        """End a request without a message to its client, which left or has everything.  False where the request is
        unknown, or belongs to another gateway than the caller.  One that is kept is put aside as it is."""
        request = self.requests.get(request_id) or self.finished.get(request_id)
        if request is None or gateway not in ("", request.header.gateway):
            return False
        if has_everything and request.search is None:  # a detokenizer ended it: its message is on its way
            for sequence in request.unfinished:
                self._finalizer.finish(sequence)
        if request_id in self.finished:
            if not request.header.is_kept:
                self._finalizer.forget(request)
            return True
        if request.header.is_kept:
            self.parking.put(request)
        self.counters.num_aborted += 1
        self.journal.request("request_aborted", request, **self.accounts.so_far(request))
        self._finalizer.drop(request)
        return True

    def abort_gateway(self, address: str) -> list[str]:
        """End all requests of a gateway that is gone; returns their ids."""
        requests = (*self.requests.values(), *self.finished.values())
        lost = [request.request_id for request in requests if request.header.gateway == address]
        for request_id in lost:
            self.abort(request_id)
        return lost

    def expire(self, now: float) -> list[str]:
        """End the requests whose deadline has passed, or for which no worker has had room for long; returns their ids.
        Forget those long finished or put aside."""
        self.clock.now = now
        self.parking.expire(now)
        self._finalizer.expire(now)
        if self.shares.num_tenants > MAX_TENANTS:
            self.shares.forget_absent({request.tenant for request in self.requests.values()})
        late = [r for r in self.requests.values() if r.header.deadline is not None and r.header.deadline <= now]
        for request in late:
            self.counters.num_expired += 1
            if request.header.is_kept:
                self.parking.put(request)
            self._finalizer.fail(request, RequestError("the deadline has passed", code=RejectCode.DEADLINE_EXCEEDED))
        roomless = self._assignment.overdue(now, self.policy.resume_timeout)
        for request in roomless:
            self._finalizer.fail(request, unplaceable(request, self.policy.resume_timeout))
        return [request.request_id for request in (*late, *roomless)]

    def stop_matched(self, message: StopMatched) -> None:
        """A detokenizer has found a stop string, and has sent the client its end."""
        request = self.requests.get(message.request_id)
        if request is None or request.search is not None or not 0 <= message.index < len(request.sequences):
            return
        if (sequence := request.sequences[message.index]).status is not Status.FINISHED:
            self._finalizer.finish(sequence)

    def stream_lost(self, message: StreamLost) -> None:
        """A detokenizer does not know a stream: send it again from the start; the gateway drops what it has."""
        if request := self.requests.get(message.request_id) or self.finished.get(message.request_id):
            self.outbound.emit_again(request)

    # -- workers and detokenizers

    def set_detokenizers(self, addresses: Iterable[str]) -> None:
        """The live detokenizers have changed: streams of one that is gone are opened again elsewhere."""
        self._detokenizers = list(addresses)
        for request in (*self.requests.values(), *self.finished.values()):
            if request.detokenizer not in self._detokenizers:
                request.detokenizer = pick(request.request_id, self._detokenizers) or ""
                self.outbound.emit_again(request)

    def add_worker(self, instance: str, epoch: int, capacity: WorkerCapacity) -> None:
        """A worker has come, or come back: its pool is empty."""
        if instance in self.replicas:
            self.lose_worker(instance)
        self.deaths.forget(instance)
        replica = Replica(instance, epoch, capacity, self.shares, self.clock, self.moves.stores, self.moves.peers)
        self.replicas[instance] = replica
        self.accounts.add_worker(replica)
        self.events.join(replica)
        self._batchers[instance] = Batcher(replica, self.policy, self._drafting, self.forks, self._books)
        self._drafting.renew()
        self.intake.limit()
        self._assignment.rebalance()

    def retire_worker(self, instance: str) -> None:
        """A worker leaves in order: its requests go on elsewhere, by the preemption path."""
        if replica := self.replicas.pop(instance, None):
            self._forget(replica)
            self.intake.limit()
            self._assignment.reassign(self._assignment.vacate(replica, self.clock.now))

    def lose_worker(self, instance: str, now: float | None = None) -> None:
        """A worker has died: its requests go on elsewhere.

        A request that kills workers is in flight at every death.  One that was in flight at two deaths without a token
        in between is quarantined: no other such request runs beside it, so that the next death identifies it, and it
        ends alone.  Two deaths identify none: a host may take two workers with it, and what ran on the one was perhaps
        just sent to the other.
        """
        self.clock.now = self.clock.now if now is None else now
        if (replica := self.replicas.pop(instance, None)) is None:
            return
        self._forget(replica)
        self.intake.limit()
        self.counters.num_worker_losses += 1
        in_flight = {sequence.request for step in replica.in_flight for sequence in step.sequences}
        self._assignment.unassigned += self._assignment.vacate(replica, self.accounts.workers[replica].heard_at)
        for request in self.deaths.count(instance, in_flight):
            self._finalizer.fail(request, deadly(request))
        self._assignment.reassign([])

    def _forget(self, replica: Replica) -> None:
        del self._batchers[replica.instance]
        self.events.leave(replica)
        self.handovers.forget(replica)
        self._reconciliation.forget(replica)
        self._drafting.forget(replica)

    # -- steps

    def schedule(self, instance: str, now: float = 0.0) -> StepPlan | None:
        """The next plan for a worker; None where two steps are in flight, or one and what comes would have to wait for
        the next: for background sequences, while streams go over, and while the worker loads an adapter, for which
        requests wait; where drafts are worth waiting for; or where there is nothing to do."""
        replica = self.replicas[instance]
        self.clock.now = now
        self.handovers.advance(replica)
        if len(replica.in_flight) >= MAX_STEPS_IN_FLIGHT or (replica.in_flight and self._waits_for_result(replica)):
            return None
        if self._drafting.awaits(replica, now):
            if not replica.in_flight:
                self.accounts.workers[replica].idle.begin(now)
            return None
        self.accounts.workers[replica].idle.end(now)
        plan = self._batchers[instance].next_plan()
        if plan is not None and self._drafting.speculations:
            self._drafting.planned(replica)
        return plan

    def _waits_for_result(self, replica: Replica) -> bool:
        return replica.is_in_background or replica.adapters.is_loading or self.handovers.awaits_result(replica)

    def apply(self, instance: str, result: StepResult, now: float = 0.0) -> bool:
        """Take a step's tokens in.  False where the result is of another life, or a repetition.  Raises StepLost where
        an earlier one is missing, ProtocolError where it is no answer to its plan."""
        replica = self.replicas.get(instance)
        if replica is None or result.epoch != replica.epoch:
            return False
        return self._step_results.take(replica, result, now)

    def ask_holdings(self, instance: str) -> ReportHoldings:
        """What to send to a worker now, in order with its plans."""
        return self._reconciliation.ask(self.replicas[instance], self.forks.unsent)

    def reconcile(self, message: Holdings) -> bool:
        """Correct what a worker holds otherwise than it should.  False where the report is of another life.  Raises
        StepLost where a plan or an answer has gone missing, ProtocolError where the report is invalid."""
        for replica in self.replicas.values():
            if replica.epoch == message.epoch:
                self._reconciliation.compare(replica, message)
                return True
        return False

    def check_ledgers(self) -> None:
        """Correct pools and rows by the tables of the running sequences."""
        for replica in self.replicas.values():
            self._reconciliation.check(replica)

    def renew_worker(self, instance: str, epoch: int) -> None:
        """Start over with a worker after a message was lost; no request is suspected."""
        self.counters.num_lost_steps += 1
        capacity = self.replicas[instance].capacity
        self.retire_worker(instance)
        self.add_worker(instance, epoch, capacity)

    # -- drafts

    def add_draft(self, instance: str, epoch: int, capacity: DraftCapacity) -> None:
        """A draft has come, or come back; it knows nothing yet."""
        self.drafts.add(instance, epoch, capacity)
        self._drafting.renew()

    def lose_draft(self, instance: str) -> None:
        """A draft is gone: its sequences go on without, or with another."""
        self.drafts.lose(instance)
        if not self.drafts:
            self._drafting.renew()

    def propose(self, message: DraftProposals) -> bool:
        """Take a draft's proposals in.  False where they are of another life.  Raises ProtocolError where they are
        invalid: nothing of them is kept."""
        return self._drafting.propose(message, self.intake.capacity)

    def take_updates(self) -> list[tuple[str, DraftUpdate]]:
        """By instance, what to send to each draft now."""
        return self.drafts.take_updates()

    @property
    def wake_time(self) -> float | None:
        """When `schedule` has to be called again although no message comes; None where that is not so."""
        times = (self._drafting.wake_time, self.moves.wake_time)
        return min((time for time in times if time is not None), default=None)
