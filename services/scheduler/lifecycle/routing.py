"""Which worker a sequence waits at: a routing policy scores every worker, the lowest score wins.

round_robin     every score is zero: workers take turns
least_loaded    waiting + running + 6 waiting max(0, KV usage - 1/2), as vLLM's balancer scores its engines
prefix_aware    10 x blocks to prefill there + blocks held there, as Dynamo's router does it: what that worker's cache
                has of the prompt is not to prefill, so a request goes where its prefix is, unless that worker is too
                busy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence

WAITING_WEIGHT = 6  # of a waiting request at a worker whose cache is full, against one that runs
PREFILL_SCALE = 10.0  # a block to prefill against one that is held; chosen by docs/measurements/simulator.md
Score = Callable[[Sequence, Replica], float]


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice and what it was made by; no scores where there was nothing to choose."""

    replica: Replica
    candidates: Seq[Replica] = ()
    scores: Seq[float] = ()  # parallel to candidates

    def __str__(self) -> str:
        pairs = zip(self.candidates, self.scores, strict=True)
        return " ".join(f"{replica.instance}={score:g}" for replica, score in pairs)


class Router:
    """Applies one policy.  Of equal scores the first after the last choice wins, so that equals take turns.

    What has output already goes on only where the same bits are computed.
    """

    def __init__(self, policy: str, *, use_cache: bool = True) -> None:
        self._score = SCORES[policy] if use_cache else SCORES_WITHOUT_CACHE[policy]
        self._next = 0

    def place(self, sequence: Sequence, replicas: Mapping[str, Replica]) -> Placement | None:
        """The worker of the first sibling if it has one, else the best; None where no worker takes this request."""
        sibling = replicas.get(sequence.parent.worker)
        if sequence.index and sibling is not None:
            return Placement(sibling)
        candidates = [r for r in replicas.values() if r.can_serve(sequence)]
        if len(candidates) < 2:
            return Placement(candidates[0]) if candidates else None
        scores = [self._score(sequence, replica) for replica in candidates]
        chosen = self._choose(scores)
        self._next = chosen + 1
        return Placement(candidates[chosen], candidates, scores)

    def _choose(self, scores: list[float]) -> int:
        """Where the lowest score is, at or after the place whose turn it is."""
        least, turn = min(scores), self._next % len(scores)
        return scores.index(least, turn) if least in scores[turn:] else scores.index(least)


def round_robin(sequence: Sequence, replica: Replica) -> float:
    return 0.0


def least_loaded(sequence: Sequence, replica: Replica) -> float:
    """Requests in hand; those that wait weigh more as the cache fills."""
    num_waiting = len(replica.waiting)
    return num_waiting + len(replica.running) + num_waiting * WAITING_WEIGHT * max(0.0, kv_usage(replica) - 0.5)


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
    return prefix_cost(blocks_to_prefill(replica), prompt, hits, replica.pool.num_held, scale=PREFILL_SCALE)


def prefix_cost(to_prefill: float, prompt: float, overlap: float, held: float, *, scale: float = 1.0) -> float:
    """Dynamo's cost, in blocks: those queued for prefill, the prompt's, of these the cached ones, those held."""
    missing = to_prefill + prompt - overlap
    return (scale * missing if missing > 0.0 else 0.0) + held


def blocks_to_prefill(replica: Replica) -> float:
    """Of prompts that wait, and of those that are computed in part.

    These arrived last, so they stand at the end of `running`; an older one that comes back from a preemption is missed.
    """
    num_tokens = replica.waiting.num_tokens
    for sequence in reversed(replica.running):
        if sequence.num_computed_tokens >= sequence.request.num_prompt_tokens:
            break
        num_tokens += sequence.num_behind
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
