"""Which worker a sequence waits at: a routing policy scores every worker, the lowest score wins.

round_robin     every score is zero: workers take turns
least_loaded    waiting + running + 6 waiting max(0, KV usage - 1/2), as vLLM's balancer scores its engines
prefix_aware    10 x blocks to prefill there + blocks held there, as Dynamo's router does it: what that worker's cache
                has of the prompt is not to prefill, so a request goes where its prefix is, unless that worker is too
                busy; what another worker or a store has counts for as much as fetching it is cheaper than computing it

Where some workers are for prefills, a sequence with enough to compute goes to one of them first, and then to the place
that was chosen for it among the others.  A worker that is about to leave is no candidate.

Background sequences are not counted where a place is sought for one that is not: it goes before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from services.scheduler.lifecycle.moves import BlockMoves
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence
from shared.messages import WorkerRole

WAITING_WEIGHT = 6  # of a waiting request at a worker whose cache is full, against one that runs
PREFILL_SCALE = 10.0  # a block to prefill against one that is held; chosen by docs/measurements/simulator.md
LEAST_APART = 4  # blocks to compute from which a prompt goes to a worker for prefills
# Of an adapter that a worker lacks.  It is read beside steps, in about the time of a few blocks' prefill.
FETCH_COSTS = {"round_robin": 0.0, "least_loaded": 1.0, "prefix_aware": 4 * PREFILL_SCALE}
Score = Callable[[Sequence, Replica], float]


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice and what it was made by; no scores where there was nothing to choose."""

    replica: Replica
    candidates: Seq[Replica] = ()
    scores: Seq[float] = ()  # parallel to candidates
    then: str = ""  # the worker where it goes on once its full blocks are computed here

    def __str__(self) -> str:
        pairs = zip(self.candidates, self.scores, strict=True)
        return " ".join(f"{replica.instance}={score:g}" for replica, score in pairs)


class Router:
    """Applies one policy.  Of equal scores the first after the last choice wins, so that equals take turns.

    What has output already goes on only where the same bits are computed.
    """

    def __init__(
        self, policy: str, replicas: Mapping[str, Replica], moves: BlockMoves, *, use_cache: bool = True
    ) -> None:
        self._score = SCORES[policy] if use_cache else SCORES_WITHOUT_CACHE[policy]
        self._fetch_cost = FETCH_COSTS[policy]
        self._replicas = replicas
        self._moves = moves
        self._has_names = use_cache
        self._has_reach = use_cache and policy == "prefix_aware"
        self._next = 0

    def place(self, sequence: Sequence) -> Placement | None:
        """The worker of the first sibling if it has one, else the best; None where no worker takes this request."""
        sibling = self._replicas.get(sequence.parent.worker)
        if sequence.index and sibling is not None and sibling.instance not in self._moves.leaving:
            return Placement(sibling)
        candidates = self._candidates(sequence)
        placement = self._best(sequence, for_output(candidates))
        apart = [one for one in candidates if one.capacity.role is WorkerRole.PREFILL]
        if not apart or placement is None or not self._is_worth(sequence, placement.replica, apart[0]):
            return placement
        first = self._best(sequence, apart)
        return None if first is None else replace(first, then=placement.replica.instance)

    def place_again(self, sequence: Sequence) -> Placement | None:
        """Where a sequence goes on that leaves its worker with what that has computed of it."""
        return self._best(sequence, for_output(self.others(sequence)))

    def others(self, sequence: Sequence) -> list[Replica]:
        """The workers beside its own that could go on with it."""
        return [r for r in self._candidates(sequence) if r.instance != sequence.worker]

    def _candidates(self, sequence: Sequence) -> list[Replica]:
        leaving = self._moves.leaving
        return [r for r in self._replicas.values() if r.instance not in leaving and r.can_serve(sequence)]

    def _best(self, sequence: Sequence, candidates: list[Replica]) -> Placement | None:
        if len(candidates) < 2:
            return Placement(candidates[0]) if candidates else None
        scores = [self._score(sequence, replica) + self._fetch(sequence, replica) for replica in candidates]
        if self._has_reach and self._moves.are_possible:
            scores = [score - saved for score, saved in zip(scores, self._saved(sequence, candidates), strict=True)]
        chosen = self._choose(scores)
        self._next = chosen + 1
        return Placement(candidates[chosen], candidates, scores)

    def _is_worth(self, sequence: Sequence, target: Replica, apart: Replica) -> bool:
        """Whether a worker for prefills is to compute its full blocks: there are enough that the target lacks, and
        they can be found by name there."""
        spaces = apart.moves.space, target.moves.space
        if target.capacity.role is WorkerRole.PREFILL or not spaces[0] or spaces[0] != spaces[1]:
            return False
        if not (self._has_names and can_move(sequence.request)):
            return False
        names = sequence.hash_blocks(target.block_size)[: (sequence.num_tokens - 1) // target.block_size]
        return len(names) - target.pool.num_cached_of(names) >= LEAST_APART

    def _saved(self, sequence: Sequence, candidates: list[Replica]) -> list[float]:
        """Of each candidate's score: what fetching costs less than computing, where that is known."""
        saved = []
        for replica in candidates:
            moves, rate = replica.moves, replica.moves.speed.tokens_per_second
            if not moves.space or not rate:
                saved.append(0.0)
                continue
            names = sequence.hash_blocks(replica.block_size)
            num_cached = replica.pool.num_cached_of(names)
            source, count = moves.best_source(names[num_cached:])
            fetching, computing = moves.seconds_from(source, count), count * replica.block_size / rate
            is_cheaper = 0.0 < fetching < computing
            saved.append(PREFILL_SCALE * count * (1.0 - fetching / computing) if is_cheaper else 0.0)
        return saved

    def _fetch(self, sequence: Sequence, replica: Replica) -> float:
        """What it costs that a worker lacks the sequence's adapter."""
        adapter = sequence.request.adapter
        return 0.0 if not adapter or replica.adapters.holds(adapter) else self._fetch_cost

    def _choose(self, scores: list[float]) -> int:
        """Where the lowest score is, at or after the place whose turn it is."""
        least, turn = min(scores), self._next % len(scores)
        return scores.index(least, turn) if least in scores[turn:] else scores.index(least)


def for_output(candidates: list[Replica]) -> list[Replica]:
    """Those that are not there for prefills alone; all where there is none."""
    return [one for one in candidates if one.capacity.role is not WorkerRole.PREFILL] or candidates


def can_move(request: Request) -> bool:
    """Whether what one worker has computed of its sequences is found by another.  The beams of a search begin again
    behind each other all the time."""
    return request.search is None and not any(sequence.needs_all_states for sequence in request.unfinished)


def round_robin(sequence: Sequence, replica: Replica) -> float:
    return 0.0


def least_loaded(sequence: Sequence, replica: Replica) -> float:
    """Requests in hand; those that wait weigh more as the cache fills."""
    num_waiting, num_running, usage = len(replica.waiting), len(replica.running), kv_usage(replica)
    if not sequence.is_background and replica.has_background:
        num_waiting -= replica.waiting.num_background
        num_running -= replica.num_background
        columns = zip(replica.num_held_by_foreground(), replica.pools, strict=True)
        usage = max(held / pool.size for held, pool in columns)
    return num_waiting + num_running + num_waiting * WAITING_WEIGHT * max(0.0, usage - 0.5)


def prefix_aware(sequence: Sequence, replica: Replica) -> float:
    """What is to be prefilled there with this sequence, and what is held."""
    names = sequence.hash_blocks(replica.block_size)
    num_cached = len(replica.find(names).blocks) if replica.has_partial_hits else replica.pool.num_cached_of(names)
    return _prefix_cost(sequence, replica, num_cached)


def most_room(sequence: Sequence, replica: Replica) -> float:
    """`prefix_aware` where nothing is cached."""
    return _prefix_cost(sequence, replica, 0)


def _prefix_cost(sequence: Sequence, replica: Replica, hits: int) -> float:
    prompt = len(sequence.token_ids) / replica.block_size
    to_prefill, held = blocks_to_prefill(replica, in_background=sequence.is_background), replica.pool.num_held
    if not sequence.is_background and replica.has_background:
        held = replica.num_held_by_foreground()[0]
    return prefix_cost(to_prefill, prompt, hits, held, scale=PREFILL_SCALE)


def prefix_cost(to_prefill: float, prompt: float, overlap: float, held: float, *, scale: float = 1.0) -> float:
    """Dynamo's cost, in blocks: those queued for prefill, the prompt's, of these the cached ones, those held."""
    missing = to_prefill + prompt - overlap
    return (scale * missing if missing > 0.0 else 0.0) + held


def blocks_to_prefill(replica: Replica, *, in_background: bool = False) -> float:
    """Of prompts that wait, and of those that are computed in part; before a sequence that is not in the background
    comes none that is.

    These arrived last, so they stand at the end of `running`; an older one that comes back from a preemption is missed.
    """
    num_tokens, num_before = replica.waiting.num_tokens, len(replica.running)
    if not in_background:
        num_tokens -= replica.waiting.num_background_tokens
        num_before -= replica.num_background
    for other in reversed(replica.running[:num_before]):
        if other.num_computed_tokens >= other.request.num_prompt_tokens:
            break
        num_tokens += other.num_behind
    return num_tokens / replica.block_size


def kv_usage(replica: Replica) -> float:
    """Of the pool that is used most."""
    return max(pool.num_held / pool.size for pool in replica.pools)


SCORES: Mapping[str, Score] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
}
SCORES_WITHOUT_CACHE: Mapping[str, Score] = {**SCORES, "prefix_aware": most_room}
