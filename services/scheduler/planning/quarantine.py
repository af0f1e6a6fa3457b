"""Requests that may be what kills workers run one at a time."""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence
from shared.errors import RejectCode, RequestError

MAX_REMEMBERED = 64  # workers whose last deaths can be taken back


def must_be_alone(replica: Replica, sequence: Sequence) -> bool:
    """Whether a sequence may be what kills workers, and so may another request that is computed."""
    request = sequence.request
    return request.is_quarantined and any(
        other.request is not request and other.request.is_quarantined
        for index, other in enumerate(replica.running)
        if index < replica.num_active or other.num_in_flight
    )


class WorkerDeaths:
    """The deaths that are counted for requests, and taken back where the worker turns out to be alive: one that is
    silent may be slow only, as all are on a machine with too much to do."""

    def __init__(self) -> None:
        self._counted: dict[str, list[tuple[Request, int]]] = {}  # by worker: for which requests, at how many tokens

    def count(self, instance: str, in_flight: Collection[Request]) -> list[Request]:
        """Count a worker's death for the requests that it computed; returns those that it identifies as the cause: at
        most one, which was quarantined and so ran alone."""
        found = [request for request in in_flight if request.is_quarantined and not request.is_finished]
        for request in in_flight:
            request.count_death()
        self.forget(instance)
        self._counted[instance] = [(request, request.num_tokens_at_death) for request in in_flight]
        if len(self._counted) > MAX_REMEMBERED:
            self.forget(next(iter(self._counted)))
        return found

    def take_back(self, instance: str) -> None:
        """The worker that was counted as dead last under this name lives."""
        for request, num_tokens in self._counted.pop(instance, ()):
            request.take_back_death(num_tokens)

    def forget(self, instance: str) -> None:
        """What is counted stays."""
        self._counted.pop(instance, None)


def deadly(request: Request) -> RequestError:
    """The error of a request that is what kills workers."""
    text = f"workers died {request.num_worker_deaths} times in a row while they computed this request"
    return RequestError(text, code=RejectCode.INTERNAL)
