"""The metrics that every service has about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.exposition.families import Families
from shared.messages import Member
from shared.version import VERSION


class ProcessState(msgspec.Struct, frozen=True):
    """One process, at one moment."""

    service: str
    instance: str
    started: float  # Unix seconds
    progress: int
    num_dropped: int
    num_undecodable: int
    phase: str
    is_stalled: bool
    members: list[Member]  # of the deployment, as this process knows them
    losses: dict[str, int] = {}  # log lines and the like that could not be written, by kind


class ServiceCollector(Collector):
    """The metrics of one process at one moment."""

    def __init__(self, state: ProcessState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        make = Families(service=state.service, instance_id=state.instance)
        yield make.gauge(
            "pageant_process_info",
            "1; the labels say which version and in which phase: STARTING, READY, DRAINING.",
            [({"version": VERSION, "phase": state.phase}, 1)],
        )
        started = "Unix seconds at the start of the process."
        yield make.gauge("pageant_process_start_time_seconds", started, state.started)
        yield make.gauge("pageant_stalled", "1 where work waits without progress, else 0.", state.is_stalled)
        yield make.counter("pageant_messages_handled", "Messages handled.", state.progress)
        dropped = "Messages that contradicted the state of the service."
        yield make.counter("pageant_messages_dropped", dropped, state.num_dropped)
        yield make.counter("pageant_messages_undecodable", "Frames that did not decode.", state.num_undecodable)
        yield make.counter(
            "pageant_output_lost",
            "Lines and files that were not written, by kind: log, recording, steps, incident, status.",
            [({"output": kind}, count) for kind, count in state.losses.items()],
        )
        members = Counter(str(member.service) for member in state.members)
        yield make.gauge(
            "pageant_members",
            "Live processes of the deployment by service, as this one knows them.",
            [({"member": service}, count) for service, count in sorted(members.items())],
        )
