"""A deployment of containers, under compose: what happens to them there happens by Docker's own commands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.chaos.faults import Fault, FaultStage
from scripts.bench.common.clients import OPTIONS
from scripts.bench.common.stack import CLEAR_LINE, DockerError, Stack

NETWORK = "default"
DIALS = 60  # connections made until one leads to the gateway that is wanted
REFUSED_SECONDS, REFUSED_POLL = 20.0, 0.3
LOG_SECONDS = 5.0  # until a line must be in a container's log


class Containers(FaultStage):
    """Containers by service.  One gateway, the streams' own, is spared; all of them listen at one port."""

    kinds = ("kill", "crash", "freeze", "restart", "cut", "scale")
    impossible = FaultStage.impossible | {("cut", "gateway")}  # gateways share the network of the door

    def __init__(self, stack: Stack, counts: dict[str, int]) -> None:
        super().__init__(stack.address, counts)
        self.stack = stack
        self._spared = ""  # the name of the container

    @asynccontextmanager
    async def own_channel(self) -> AsyncIterator[Any]:
        """A connection to the gateway that is spared: the oldest, which scaling down leaves."""
        oldest = (await self._names("gateway"))[0]
        for _ in range(DIALS):
            channel = self.other_channel()
            if await self._reached(channel) == oldest:
                break
            await channel.close()
        else:
            raise DockerError(f"none of {DIALS} connections led to {oldest}")
        self._spared = oldest
        async with channel:
            yield channel

    def other_channel(self) -> Any:
        """A connection to whichever gateway the kernel gives it to."""
        return grpc.aio.insecure_channel(self.stack.address, options=OPTIONS)

    async def harm(self, fault: Fault) -> None:
        names = [name for name in await self._names(fault.service) if name != self._spared]
        if not names:
            return
        name = names[fault.which % len(names)]
        deeds = {"kill": self._kill, "crash": self._crash, "freeze": self._freeze, "cut": self._cut}
        if fault.kind == "restart":
            await self._docker("restart", name)
        else:
            await deeds[fault.kind](name, fault)

    async def _kill(self, name: str, fault: Fault) -> None:
        """By Docker's word, after which its restart policy rests: it is started by hand."""
        await self._docker("kill", "--signal", "KILL", name)
        await asyncio.sleep(fault.duration)
        await self._docker("start", name)

    async def _crash(self, name: str, fault: Fault) -> None:
        """The process dies, and the restart policy starts another."""
        with contextlib.suppress(DockerError):  # it may end with the container
            await asyncio.to_thread(self.stack.docker, "exec", name, "sh", "-c", "kill -9 -1")

    async def _freeze(self, name: str, fault: Fault) -> None:
        await self._docker("pause", name)
        await asyncio.sleep(fault.duration)
        if fault.is_deadly:
            await self._docker("kill", "--signal", "KILL", name)
            await self._docker("start", name)
        else:
            await self._docker("unpause", name)

    async def _cut(self, name: str, fault: Fault) -> None:
        """Off the network and on it again, where it then has another address."""
        network = f"{self.stack.project}_{NETWORK}"
        await self._docker("network", "disconnect", network, name)
        await asyncio.sleep(fault.duration)
        await self._docker("network", "connect", "--alias", fault.service, network, name)

    async def set_count(self, service: str) -> None:
        scale = [f"--scale={name}={number}" for name, number in self.counts.items()]
        await asyncio.to_thread(self.stack.compose, "up", "--detach", "--no-recreate", *scale)

    async def _names(self, service: str) -> list[str]:
        containers = await asyncio.to_thread(self.stack.containers, service)
        names = [str(one["Name"]) for one in containers]  # as compose makes them, project-service-number
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    async def _docker(self, *arguments: str) -> None:
        """A command, tried for a while: a container that is just being started again refuses it."""
        deadline = time.monotonic() + REFUSED_SECONDS
        while True:
            try:
                await asyncio.to_thread(self.stack.docker, *arguments)
                return
            except DockerError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(REFUSED_POLL)

    async def _reached(self, channel: Any) -> str:
        """The container that a connection leads to: the one whose log knows a request made over it."""
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="Once", sampling={"max_tokens": 1}))
        request_id = str(dict(await call.initial_metadata())["x-request-id"])
        async for _ in call:
            pass
        deadline = time.monotonic() + LOG_SECONDS
        while time.monotonic() < deadline:
            lines = await asyncio.to_thread(self.stack.compose, "logs", "--no-color", "--tail", "200", "gateway")
            for line in lines.replace(CLEAR_LINE, "").splitlines():
                if request_id in line:
                    return f"{self.stack.project}-{line.partition('|')[0].strip()}"
        raise DockerError(f"no gateway's log has request {request_id}")
