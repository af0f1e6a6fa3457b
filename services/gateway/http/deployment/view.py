"""The deployment at one moment, as this gateway and the scheduler know it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shared.messages import Load, Roster, ServiceName, WorkerLoad
from shared.processes.supervision import SupervisionReport

T = TypeVar("T", bound=msgspec.Struct)


class Counts(msgspec.Struct, kw_only=True):
    """What the scheduler counts; all but the first five since its start, so that rates are differences."""

    running: int  # sequences that take part in steps
    waiting: int  # sequences that wait to be admitted
    background_running: int  # of batches, not in `running`
    background_waiting: int
    kv_cache_usage: float  # share of the KV blocks that running sequences hold, 0 to 1
    prompt_tokens: int
    output_tokens: int
    finished: int  # requests
    preemptions: int
    worker_losses: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    draft_tokens: int
    accepted_tokens: int
    stored_blocks: int  # that workers gave to stores
    fetched_tokens: int  # that came from stores and other workers: they were not computed


class WorkerView(msgspec.Struct, kw_only=True):
    instance: str
    running: int  # sequences with a row
    blocks: int
    free_blocks: int  # without contents
    cached_blocks: int  # free, with contents worth keeping
    steps: int


class ServiceView(msgspec.Struct, kw_only=True):
    service: str
    instances: list[str]  # live ones


class GatewayView(msgspec.Struct, kw_only=True):
    """Of the gateway that answers, alone."""

    open_streams: int
    paused_streams: int  # they wait for a service to return


class DeploymentView(msgspec.Struct, kw_only=True):
    time: float  # seconds of a clock that only goes forward, for rates
    model: str
    version: str
    reason: str  # why requests are not served now, or empty
    services: list[ServiceView]
    workers: list[WorkerView]
    gateway: GatewayView
    counts: Counts | None  # null where no scheduler answers
    supervisor: SupervisionReport | None  # null where there is none: processes are looked after by something else
    refusal: str  # why the caller may not restart or scale services, or empty


def counts(load: Load) -> Counts:
    return _numbers(
        Counts,
        load,
        kv_cache_usage=load.kv_cache_usage,
        stored_blocks=load.moves.num_stored_blocks,
        fetched_tokens=load.moves.num_fetched_tokens,
    )


def workers(load: Load) -> list[WorkerView]:
    return [_numbers(WorkerView, one, instance=one.instance) for one in load.workers]


def _numbers(kind: type[T], load: Load | WorkerLoad, **others: Any) -> T:
    """The `others`, and what a load calls by a field's name behind `num_`."""
    names = kind.__struct_fields__
    return kind(**others, **{name: getattr(load, f"num_{name}") for name in names if name not in others})


def services(roster: Roster, *, scheduler_is_live: bool) -> list[ServiceView]:
    """Every service with its live instances.  The roster is the scheduler's own, and lists all others."""
    found: dict[str, list[str]] = {str(service): [] for service in ServiceName}
    if scheduler_is_live:
        found[ServiceName.SCHEDULER].append("scheduler")
    for member in roster.members:
        found[str(member.service)].append(member.instance)
    return [ServiceView(service=name, instances=sorted(instances)) for name, instances in found.items()]
