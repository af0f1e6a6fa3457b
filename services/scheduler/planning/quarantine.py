"""Requests that may be what kills workers run one at a time."""

from __future__ import annotations

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


def must_be_alone(replica: Replica, sequence: Sequence) -> bool:
    """Whether a sequence may be what kills workers, and so may another request that is computed."""
    request = sequence.request
    return request.is_quarantined and any(
        other.request is not request and other.request.is_quarantined
        for index, other in enumerate(replica.running)
        if index < replica.num_active or other.num_in_flight
    )
