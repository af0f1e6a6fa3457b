"""Requests that may be what kills workers run one at a time."""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence


def must_be_alone(replica: Replica, sequence: Sequence) -> bool:
    """Whether a sequence may be what kills workers, and so may another request that is computed."""
    request = sequence.request
    return request.is_quarantined and any(
        other.request is not request and other.request.is_quarantined
        for index, other in enumerate(replica.running)
        if index < replica.num_active or other.num_in_flight
    )


def killers(in_flight: Collection[Request]) -> list[Request]:
    """Count a worker's death for the requests that it computed; returns those that it identifies as the cause: at most
    one, which was quarantined and so ran alone."""
    found = [request for request in in_flight if request.is_quarantined and not request.is_finished]
    for request in in_flight:
        request.count_death()
    return found
