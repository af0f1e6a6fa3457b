"""The scheduler's state in numbers, for GetLoad and for incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from services.scheduler.scheduler import Scheduler
from services.scheduler.state.replica import Replica
from shared.messages import Load, WorkerLoad
from shared.metrics.histogram import STEP_TOKENS, Histogram

MAX_RUNNING = 256  # sequences listed of each worker


def load_of(core: Scheduler, request_id: str, step_tokens: Histogram, held: tuple[int, int] = (0, 0)) -> Load:
    """The answer to one GetLoad.  `held`: requests that wait for the model to be loaded, and those of the background
    that do."""
    num_held, num_background_held = held
    workers = [worker_load(replica) for replica in core.replicas.values()]
    num_background_running = sum(replica.num_background for replica in core.replicas.values())
    num_background_waiting = num_background_held
    num_background_waiting += sum(replica.waiting.num_background for replica in core.replicas.values())
    num_background_waiting += sum(sequence.is_background for sequence in core.unassigned)
    counted = {name: getattr(core.counters, name) for name in Load.__struct_fields__ if hasattr(core.counters, name)}
    return Load(
        request_id=request_id,
        num_running=sum(worker.num_running for worker in workers) - num_background_running,
        num_waiting=core.num_waiting + num_held,
        workers=workers,
        num_accepted_tokens_per_position=list(core.counters.num_accepted_per_position),
        kv_cache_usage=kv_cache_usage(core.replicas.values()),
        step_tokens=list(step_tokens.counts),
        step_tokens_sum=int(step_tokens.sum),
        num_background_running=num_background_running,
        num_background_waiting=num_background_waiting,
        adapters=core.adapters.loads(),
        moves=core.moves.counts,
        **counted,
    )


def kv_cache_usage(replicas: Iterable[Replica]) -> float:
    """The part of the blocks that is held, of the pools (first ones, second ones, ...) of which it is the largest.

    What background sequences hold is not counted: any other request gets it.
    """
    held, sizes = Counter[int](), Counter[int]()
    for replica in replicas:
        for index, (pool, num_held) in enumerate(zip(replica.pools, replica.num_held_by_foreground(), strict=True)):
            held[index] += num_held
            sizes[index] += pool.size
    return max((held[index] / size for index, size in sizes.items()), default=0.0)


def worker_load(replica: Replica) -> WorkerLoad:
    """With the blocks of all its pools."""
    num_cached = sum(pool.num_cached for pool in replica.pools)
    return WorkerLoad(
        instance=replica.instance,
        num_running=len(replica.running),
        num_blocks=sum(pool.size for pool in replica.pools),
        num_free_blocks=sum(pool.num_available for pool in replica.pools) - num_cached,
        num_cached_blocks=num_cached,
        num_steps=replica.num_steps,
        fingerprint=replica.capacity.fingerprint,
    )


def snapshot_of(core: Scheduler) -> dict[str, Any]:
    """What each sequence holds and waits for, without the contents of prompts and outputs."""
    return {
        "load": msgspec.structs.asdict(load_of(core, "", Histogram(STEP_TOKENS))),
        "num_requests": len(core.requests),
        "num_finished_kept": len(core.finished),
        "num_homeless": len(core.unassigned),
        "workers": {name: replica_snapshot(replica) for name, replica in core.replicas.items()},
    }


def replica_snapshot(replica: Replica) -> dict[str, Any]:
    return {
        "epoch": replica.epoch,
        "num_free_rows": replica.num_free_rows,
        "num_available_blocks": [pool.num_available for pool in replica.pools],
        "num_waiting": len(replica.waiting),
        "in_flight": [
            {"step_id": step.step_id, "num_sequences": len(step.sequences), "num_tokens": sum(step.num_scheduled)}
            for step in replica.in_flight
        ],
        "running": [
            {
                "request_id": sequence.request.request_id,
                "index": sequence.index,
                "row": sequence.row,
                "num_tokens": sequence.num_tokens,
                "num_computed_tokens": sequence.num_computed_tokens,
                "num_pending": sequence.num_pending,
                "num_blocks": [len(table.block_ids) for table in sequence.tables],
                "num_preemptions": sequence.num_preemptions,
            }
            for sequence in replica.running[:MAX_RUNNING]
        ],
    }
