"""What is done to whom, and when: a schedule that one seed fixes."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import msgspec

from scripts.bench.chaos.deployment import Deployment

KINDS = ("kill", "freeze", "restart", "scale")
LONGEST_FREEZE = 4.0  # seconds; beyond the heartbeat timeout, so that a frozen service is given up and comes back
SHARE_KILLED = 0.3  # of those frozen: they end without having waked
MOST = {"tokenizer": 3, "detokenizer": 3, "worker": 2, "draft": 2, "gateway": 2}


class Fault(msgspec.Struct, frozen=True):
    """One thing that happens to one service.  Times in seconds."""

    kind: str
    service: str
    which: int  # of the replicas, counted round
    duration: float  # of a freeze
    is_deadly: bool  # whether a freeze ends in a kill
    overlaps: bool  # the next one does not wait until all is well again
    gap: float  # after it


class Inflicted(msgspec.Struct, frozen=True):
    """A fault that took place, from when to when it may have been felt."""

    fault: Fault
    begun: float
    ended: float


def schedule(num_faults: int, seed: int, services: list[str]) -> list[Fault]:
    """Every kind for every service in turn, in a shuffled order; the one scheduler cannot be scaled."""
    rng = random.Random(seed)
    pairs = [(kind, service) for service in services for kind in KINDS if (kind, service) != ("scale", "scheduler")]
    order: list[tuple[str, str]] = []
    while len(order) < num_faults:
        order += rng.sample(pairs, len(pairs))
    return [
        Fault(
            kind=kind,
            service=service,
            which=rng.randrange(6),
            duration=rng.uniform(0.2, LONGEST_FREEZE),
            is_deadly=rng.random() < SHARE_KILLED,
            overlaps=index + 1 < num_faults and order[index + 1][1] != service and rng.random() < 0.15,
            gap=rng.uniform(0.0, 0.6),
        )
        for index, (kind, service) in enumerate(order[:num_faults])
    ]


async def inflict(fault: Fault, deployment: Deployment) -> Inflicted:
    """Do it; returns once the worst is over (a frozen service is awake or dead)."""
    supervisor = deployment.supervisor
    children = [child for child in supervisor.cast(fault.service) if child.alive]
    if fault.service == "gateway":
        children = [child for child in children if child.role.index > 0]  # the first has the streams
    begun = time.monotonic()
    if fault.kind == "scale":
        _scale(fault, deployment)
    elif children:
        child = children[fault.which % len(children)]
        if fault.kind == "kill":
            deployment.signal(child, signal.SIGKILL)
        elif fault.kind == "restart":
            supervisor.dismiss(child, replace=True)
        else:
            deployment.signal(child, signal.SIGSTOP)
            await asyncio.sleep(fault.duration)
            deployment.signal(child, signal.SIGKILL if fault.is_deadly else signal.SIGCONT)
    return Inflicted(fault, begun, time.monotonic())


def _scale(fault: Fault, deployment: Deployment) -> None:
    """One more, or one less where there are as many as there should be."""
    present = len(deployment.supervisor.cast(fault.service))
    deployment.supervisor.scale(fault.service, present + 1 if present < MOST[fault.service] else present - 1)
