"""What is done to which service, and when: a schedule that one seed fixes."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec

from protos.pageant.v1 import control_pb2, control_pb2_grpc

LONGEST_FREEZE = 4.0  # seconds; beyond the heartbeat timeout, so that a frozen service is given up and comes back
SHARE_KILLED = 0.3  # of those frozen: they end without having waked
MOST = {"tokenizer": 3, "detokenizer": 3, "worker": 2, "draft": 2, "gateway": 2, "store": 2}  # or as many as at first
LOAD_POLL = 0.05


class Fault(msgspec.Struct, frozen=True):
    """One thing that happens to one service.  Times in seconds."""

    kind: str
    service: str
    which: int  # of the replicas, counted round
    duration: float  # of a freeze, a cut, and until one that was killed is started
    is_deadly: bool  # whether a freeze ends in a kill
    overlaps: bool  # the next one does not wait until all is well again
    gap: float  # after it


class Inflicted(msgspec.Struct, frozen=True):
    """A fault that took place, from when to when it may have been felt."""

    fault: Fault
    begun: float
    ended: float


class FaultStage(ABC):
    """Where it happens: a deployment whose services can be harmed, all but one gateway, which has the streams."""

    kinds: tuple[str, ...]
    impossible = {("scale", "scheduler"), ("scale", "rank"), ("restart", "rank")}  # there is one; its worker is

    def __init__(self, address: str, counts: Mapping[str, int]) -> None:
        """`address`: of the gateways; `counts`: processes of each service."""
        self.address = address
        self.counts = dict(counts)
        self._most = {service: max(most, counts.get(service, 0)) for service, most in MOST.items()}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The kinds of fault and the services that they can befall."""
        pairs = [(kind, service) for service in sorted(self.counts) for kind in self.kinds]
        return [pair for pair in pairs if pair not in self.impossible]

    @abstractmethod
    def own_channel(self) -> AbstractAsyncContextManager[Any]:
        """A connection to the gateway that is spared."""

    @abstractmethod
    def other_channel(self) -> Any:
        """A connection to a gateway that may die."""

    @abstractmethod
    async def harm(self, fault: Fault) -> None:
        """Do it to a process; returns once the worst is over (a frozen service is awake or dead)."""

    @abstractmethod
    async def set_count(self, service: str) -> None:
        """Have as many processes of a service as `counts` says."""

    async def count_moves(self) -> None:
        """Add what has moved since the last time, where that is known."""

    async def inflict(self, fault: Fault) -> Inflicted:
        """Let it happen, and note when."""
        begun = time.monotonic()
        if fault.kind == "scale":  # one more, or one less where there are as many as there should be
            count = self.counts[fault.service]
            self.counts[fault.service] = count + 1 if count < self._most[fault.service] else count - 1
            await self.set_count(fault.service)
        else:
            await self.harm(fault)
        return Inflicted(fault, begun, time.monotonic())

    async def settled_load(self, seconds: float = 15.0) -> Any:
        """The scheduler's load once nothing runs or waits; as it is where that does not happen in time."""
        deadline = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            while True:
                load = await stub.GetLoad(control_pb2.GetLoadRequest(), timeout=5)
                if not (load.num_running or load.num_waiting) or time.monotonic() > deadline:
                    return load
                await asyncio.sleep(LOAD_POLL)


def schedule(num_faults: int, seed: int, pairs: list[tuple[str, str]]) -> list[Fault]:
    """Every kind for every service in turn, in a shuffled order."""
    rng = random.Random(seed)
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
