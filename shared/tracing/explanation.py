"""Where a request's time went, in words: for a log line, and for a client that asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shared.messages.latency import LatencyBreakdown
from shared.tracing.latency import milliseconds, settled
from shared.tracing.phases import MISS_LABELS, QUEUE, Miss, Phase

QUEUED_FOR = {
    Phase.QUEUE_STEP: "steps were in flight",
    Phase.QUEUE_BUDGET: "the steps' tokens went to others",
    Phase.QUEUE_BLOCKS: "no free blocks",
    Phase.QUEUE_ROWS: "max_num_seqs sequences were running",
    Phase.QUEUE_FAIRNESS: "tenants that were served less came first",
    Phase.QUEUE_SIBLING: "another sequence computed its prompt",
}
GROUPS: Mapping[str, tuple[Phase, ...]] = {
    "queued": QUEUE,
    "computing the prompt": (Phase.PREFILL,),
    "generating": (Phase.DECODE,),
    "waiting for drafts": (Phase.DRAFT_WAIT,),
    "preempted and recomputed": (Phase.PREEMPTED, Phase.RECOMPUTE),
    "lost with a service that died": (Phase.LOST,),
    "in the tokenizer": (Phase.TOKENISE,),
    "in the detokenizer": (Phase.DETOKENISE,),
    "in the gateway": (Phase.GATEWAY,),
    "on the way to the tokenizer": (Phase.TO_TOKENIZER,),
    "on the way to the scheduler": (Phase.TO_SCHEDULER,),
    "on the way to the detokenizer": (Phase.TO_DETOKENIZER,),
    "on the way to the gateway": (Phase.TO_GATEWAY,),
    "until the client had read": (Phase.CLIENT_BLOCKED,),
    "not answered": (Phase.UNTOLD,),
    "on the way from the client": (Phase.FROM_CLIENT,),
    "waiting for the model to be loaded": (Phase.WAKING,),
}
GROUP_OF_PHASE = tuple(next(words for words, phases in GROUPS.items() if phase in phases) for phase in Phase)
MISSED_FOR = {
    Miss.BELOW_BLOCK: "below a block",
    Miss.NEVER_SEEN: "never seen",
    Miss.EVICTED: "evicted",
    Miss.OTHER_WORKER: "cached at another worker",
    Miss.WORKER_LOST: "cached at a worker that is gone",
    Miss.SALT: "cached for another tenant",
    Miss.NOT_ASKED: "not looked up",
    Miss.OFF: "there is no cache",
    Miss.NO_STATE: "cached without a state",
}


class Explanation(msgspec.Struct, frozen=True):
    """The answer to a client that asks; names are those of the log line and of docs/tracing.md."""

    phases: dict[str, float]  # milliseconds; those that took time, in their order
    cause: str  # the longest part, in words
    misses: dict[str, int]  # prompt tokens of the first sequence that the prefix cache did not have, by reason
    num_ahead: int  # sequences that waited before it
    num_chunks: int
    num_preemptions: int
    evicted_ago_ms: int | msgspec.UnsetType = msgspec.UNSET  # absent where nothing was evicted


def explain(latency: LatencyBreakdown) -> Explanation:
    """A request's time as far as it is booked, without what its client may not learn."""
    latency = for_clients(latency)
    return Explanation(
        phases=milliseconds(latency.spent),
        cause=cause(latency),
        misses=misses_by_name(latency),
        num_ahead=latency.num_ahead,
        num_chunks=latency.num_chunks,
        num_preemptions=latency.num_preemptions,
        evicted_ago_ms=latency.evicted_ago if latency.evicted_ago >= 0 else msgspec.UNSET,
    )


def cause(latency: LatencyBreakdown) -> str:
    """The longest part of a request's time and what made it long, as one line."""
    spent = settled(latency.spent)
    sums = dict.fromkeys(GROUPS, 0)
    for words, micros in zip(GROUP_OF_PHASE, spent, strict=True):
        sums[words] += micros
    words = max(sums, key=sums.__getitem__)
    detail = _detail(words, latency, spent)
    return f"{_ms(sums[words] / 1000)} ms of {_ms(sum(spent) / 1000)} {words}{': ' if detail else ''}{detail}"


def _detail(
    words: str,
    latency: LatencyBreakdown,
    spent: Sequence[int],  # microseconds by phase, settled
) -> str:
    if words == "queued":
        longest = max(QUEUE, key=spent.__getitem__)
        return f"{QUEUED_FOR[longest]}, {latency.num_ahead} requests ahead"
    if words == "computing the prompt" and latency.misses:
        return missed(latency)
    if words == "preempted and recomputed":
        return f"{latency.num_preemptions} times"
    return ""


def missed(latency: LatencyBreakdown) -> str:
    """`288 tokens evicted 5.1 s before, 12 below a block`; empty where nothing is known of it."""
    counts = {Miss(number): count for number, count in enumerate(latency.misses) if count}
    parts = [f"{count} {MISSED_FOR[miss]}{_ago(miss, latency)}" for miss, count in counts.items()]
    return f"{sum(counts.values())} tokens to compute, {', '.join(parts)}" if parts else ""


def _ago(miss: Miss, latency: LatencyBreakdown) -> str:
    return f" {latency.evicted_ago / 1000:.1f} s before" if miss is Miss.EVICTED and latency.evicted_ago >= 0 else ""


def misses_by_name(latency: LatencyBreakdown) -> dict[str, int]:
    """Prompt tokens by reason, without reasons of no token."""
    return {label: count for label, count in zip(MISS_LABELS, latency.misses, strict=False) if count}


def for_clients(latency: LatencyBreakdown) -> LatencyBreakdown:
    """What a client may learn: never that another tenant's cache has a prompt."""
    if not latency.misses or not latency.misses[Miss.SALT]:
        return latency
    misses = list(latency.misses)
    misses[Miss.NEVER_SEEN] += misses[Miss.SALT]
    misses[Miss.SALT] = 0
    return msgspec.structs.replace(latency, misses=misses)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
