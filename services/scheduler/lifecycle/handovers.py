"""Requests that go on at another worker with what is computed of them: from a worker that leaves, and from one for
prefills.

Their full blocks are fetched by the other worker while they still run.  Once it has these, the sequences are given to
it, as after a preemption: it finds the blocks as any prefix, and computes what came since, less than a block and a few
tokens.  Where blocks do not come, they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.lifecycle.assignment import ReplicaAssignment
from services.scheduler.lifecycle.moves import BlockMoves
from services.scheduler.lifecycle.routing import can_move
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence, Status

MAX_AT_ONCE = 8  # requests on their way from one worker that leaves
MAX_ROUNDS = 8  # fetches for a request whose blocks go on growing; then it goes over, and waits for the rest there
MAX_BLOCKS = 2  # that are fetched one by one, until a request has little more than its full blocks
MAX_LOOKS = 256  # at a request whose blocks are there, in all
FREE_TOKENS = 8  # computed again in a step at the target, which it hardly notices; or as many as it has rows
NEAR_TOKENS = 3  # or fewer are left to fill a block: its worker computes about so many in two steps of the target
MAX_AWAITED = 4  # steps of the target, for which a sequence that goes over is awaited


@dataclass(slots=True)
class Handover:
    """A request under way from a worker that leaves."""

    source: str
    target: str
    num_there: dict[Sequence, int] = field(default_factory=dict)  # blocks that the target had when it was asked last
    num_rounds: int = 0
    tails: dict[Sequence, int] = field(default_factory=dict)  # tokens behind these, where it has all of them
    num_late: int = 0  # blocks that came when its tail was long already
    num_looks: int = 0  # at a time when the target had all blocks


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that was handed over, and is not scheduled at the target yet."""

    num_tokens: int  # that the target computes again
    num_steps: int  # of the target, at that time


class Handovers:
    """Invariant: the sequences of a request that are at one worker are given to another at once."""

    def __init__(
        self, policy: Policy, replicas: Mapping[str, Replica], assignment: ReplicaAssignment, moves: BlockMoves
    ) -> None:
        self.num_handed_over = 0  # sequences
        self._replicas = replicas
        self._assignment = assignment
        self._moves = moves
        self._has_names = policy.enable_prefix_caching
        self._open: dict[Request, Handover] = {}
        self._arriving: dict[Sequence, Arrival] = {}
        self._released: set[str] = set()  # workers that were told that they may leave

    def leave(self, worker: str) -> None:
        """A worker is about to leave: nothing new goes there, and what is there goes elsewhere."""
        if worker in self._replicas:
            self._moves.leaving.add(worker)
        self._released.discard(worker)

    def take_released(self) -> list[str]:
        """The workers about to leave that have nothing more to wait for; each once."""
        self._released &= self._moves.leaving
        found = sorted(name for name in self._moves.leaving - self._released if self._is_empty(name))
        self._released.update(found)
        return found

    def advance(self, replica: Replica) -> None:
        """Before each plan: what has become of moves, and which sequences go over now."""
        if replica.moves.open or self._moves.stores.lookups.are_open:
            self._moves.expire(replica)
        for one in self._replicas.values():
            if one.prefills:
                self._advance_prefills(one)
        if self._moves.leaving:
            for one in self._replicas.values():
                if one.instance in self._moves.leaving:
                    self._advance_leaving(one)
        elif self._arriving:
            self._arriving.clear()

    def awaits_result(self, replica: Replica) -> bool:
        """Whether a worker's next plan has to wait for the step in flight: streams go over to it, and a step that is
        sent ahead is one more that they, and the fetches of their blocks, would wait for."""
        return bool(self._moves.leaving) and (
            any(one.target == replica.instance and self._is_near(one, replica) for one in self._open.values())
            or any(
                sequence.worker == replica.instance
                and sequence.status is Status.WAITING
                and replica.num_steps - arrival.num_steps < MAX_AWAITED
                for sequence, arrival in self._arriving.items()
            )
        )

    def _is_near(self, one: Handover, target: Replica) -> bool:
        """Whether it may go over within the next steps: blocks come, or its last one is nearly full."""
        return not one.tails or max(one.tails.values()) >= target.block_size - NEAR_TOKENS

    def forget(self, replica: Replica) -> None:
        """A life of a worker is over."""
        self._moves.forget(replica)
        self._open = {request: one for request, one in self._open.items() if one.source != replica.instance}

    # -- from a worker for prefills

    def _advance_prefills(self, source: Replica) -> None:
        """Have the targets fetch what is computed; once everything is, the rest is fetched while the sequence waits
        there.  Where there is no target any more, the sequence is computed to its end where it is."""
        for request, name in list(source.prefills.items()):
            here = [one for one in request.unfinished if one.worker == source.instance]
            target = self._target(here[0], name) if here else None
            if target is None or target is source:
                del source.prefills[request]
                continue
            source.prefills[request] = target.instance
            for sequence in here:
                target.moves.follow(self._names(sequence, source), is_unhurried=False)
            if all(self._is_computed(sequence, source) for sequence in here):
                self._hand_over(request, here, source, target)

    def _names(self, sequence: Sequence, source: Replica) -> list[bytes]:
        """Of its blocks that are full and computed; none of a sequence that waits for its sibling."""
        if not self._has_names:
            return []
        names = sequence.hash_blocks(source.block_size)
        if sequence.status is Status.RUNNING:
            return names[: sequence.num_registered_blocks]
        usable = names[: (sequence.num_tokens - 1) // source.block_size]
        return usable[: source.pool.num_cached_of(usable)]

    def _is_computed(self, sequence: Sequence, source: Replica) -> bool:
        if sequence.status is Status.RUNNING:
            return sequence.num_computed_tokens >= source.end_of(sequence)
        return len(self._names(sequence, source)) * source.block_size >= source.end_of(sequence)

    # -- from a worker that leaves

    def _advance_leaving(self, source: Replica) -> None:
        """What only waits is placed again; of what runs, some requests at a time are on their way."""
        by_request: dict[Request, list[Sequence]] = {}
        for sequence in (*source.running, *source.waiting):
            by_request.setdefault(sequence.request, []).append(sequence)
        self._open = {r: one for r, one in self._open.items() if one.source != source.instance or r in by_request}
        self._arriving = {s: arrival for s, arrival in self._arriving.items() if s.status is Status.WAITING}
        num_open = sum(one.source == source.instance for one in self._open.values())
        for request, here in by_request.items():
            if not self._can_leave(request, here[0]):
                continue
            if all(sequence.status is Status.WAITING for sequence in here):
                for sequence in here:
                    self._assignment.withdraw(sequence, source)
                self._assignment.reassign(here)
                continue
            if request not in self._open and num_open < MAX_AT_ONCE:
                self._open[request] = Handover(source.instance, "")
                num_open += 1
            if (one := self._open.get(request)) is not None:
                target = self._target(here[0], one.target)
                if target is None or not self._is_there(one, here, source, target):
                    continue
                if self._is_time(one, target, source.block_size):
                    self._arriving |= {s: Arrival(count, target.num_steps) for s, count in one.tails.items()}
                    self._hand_over(request, here, source, target)

    def _can_leave(self, request: Request, first: Sequence) -> bool:
        """Whether it goes on elsewhere with what is computed of it; what does not goes when the worker has left."""
        return can_move(request) and bool(self._assignment.router.others(first))

    def _is_there(self, one: Handover, here: list[Sequence], source: Replica, target: Replica) -> bool:
        """Whether the target has what is computed, or gets no more of it in this way."""
        if one.target != target.instance:
            one.target, one.num_rounds, one.num_looks, one.num_late = target.instance, 0, 0, 0
            one.num_there.clear()
        is_there = True
        one.tails.clear()
        for sequence in here:
            names = self._names(sequence, source) if sequence.status is Status.RUNNING else []
            before = num_there = one.num_there.get(sequence, 0)
            while num_there < len(names) and target.pool.knows(names[num_there]):
                num_there += 1
            one.num_there[sequence] = num_there
            if num_there < len(names):
                one.num_rounds += num_there > before
                is_there &= not target.moves.follow(names, is_unhurried=True) or one.num_rounds > MAX_ROUNDS
            elif names:
                one.tails[sequence] = sequence.num_tokens + sequence.num_pending - num_there * source.block_size
                one.num_late += num_there > before and one.tails[sequence] > source.block_size // 2
        return is_there

    def _is_time(self, one: Handover, target: Replica, block_size: int) -> bool:
        """Whether little is computed again at the target, in a step that all streams there wait for.  Soon after a
        block is full it is a few tokens of each sequence; several requests share a step while that has few."""
        one.num_looks += 1
        if not one.tails or one.num_looks > MAX_LOOKS:
            return True
        coming = (arrival for s, arrival in self._arriving.items() if s.worker == target.instance)
        num_arriving = sum(arrival.num_tokens for arrival in coming)
        has_room = num_arriving + sum(one.tails.values()) <= max(FREE_TOKENS, len(target.running))
        is_short = max(one.tails.values()) <= block_size // 2 or one.num_late > MAX_BLOCKS
        return is_short and (has_room or not num_arriving)

    def _is_empty(self, worker: str) -> bool:
        replica = self._replicas.get(worker)
        if replica is None:
            return True
        if any(self._can_leave(one.request, one) for one in (*replica.running, *replica.waiting)):
            return False
        gone = {s for step in replica.in_flight for s in step.sequences if s.worker != worker}
        return not replica.moves.has_lent and all(one.status is Status.FINISHED for one in gone)

    # -- both

    def _target(self, sequence: Sequence, name: str) -> Replica | None:
        """The worker that was chosen, as long as it is there; else another one, None where there is none."""
        chosen = self._replicas.get(name)
        if chosen is not None and name not in self._moves.leaving and chosen.can_serve(sequence):
            return chosen
        placement = self._assignment.router.place_again(sequence)
        return None if placement is None else placement.replica

    def _hand_over(self, request: Request, here: list[Sequence], source: Replica, target: Replica) -> None:
        for sequence in here:
            self._assignment.hand_over(sequence, source, target)
        self.num_handed_over += len(here)
        source.prefills.pop(request, None)
        self._open.pop(request, None)
