"""The scheduler's state in numbers, for GetLoad."""

from __future__ import annotations

from services.scheduler.replica import Replica
from services.scheduler.scheduler import Scheduler
from shared.messages import Load, WorkerLoad


def load_of(core: Scheduler, request_id: str) -> Load:
    """The answer to one GetLoad."""
    workers = [worker_load(replica) for replica in core.replicas.values()]
    counters = core.counters
    num_blocks = sum(worker.num_blocks for worker in workers)
    num_available = sum(worker.num_free_blocks + worker.num_cached_blocks for worker in workers)
    return Load(
        request_id=request_id,
        num_running=sum(worker.num_running for worker in workers),
        num_waiting=core.num_waiting,
        workers=workers,
        num_preemptions=counters.num_preemptions,
        num_prefix_cache_queries=counters.num_prefix_cache_queries,
        num_prefix_cache_hits=counters.num_prefix_cache_hits,
        num_chunked_prefills=counters.num_chunked_prefills,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_finished=counters.num_finished,
        num_aborted=counters.num_aborted,
        num_rejected=counters.num_rejected,
        num_block_copies=counters.num_block_copies,
        kv_cache_usage=1 - num_available / num_blocks if num_blocks else 0.0,
    )


def worker_load(replica: Replica) -> WorkerLoad:
    num_cached = replica.pool.num_cached
    return WorkerLoad(
        instance=replica.instance,
        num_running=len(replica.running),
        num_blocks=replica.pool.size,
        num_free_blocks=replica.pool.num_available - num_cached,
        num_cached_blocks=num_cached,
        num_steps=replica.num_steps,
    )
