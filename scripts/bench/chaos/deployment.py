"""A deployment of local processes, under the supervisor of `pageant serve`, in one event loop with its clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from scripts.bench.chaos.faults import MOST, Fault, settled_load
from services.cli.processes import Starter
from services.cli.serve import free_port
from services.cli.supervisor import KILL_AFTER, ChildProcess, Role, Supervisor
from shared.config import Settings

TURN = 0.02  # seconds between the supervisor's looks
READY_SECONDS = 120.0
KINDS = ("kill", "freeze", "restart", "scale")
MAX_DELAY = 0.4  # seconds until a restart, however often a service was killed: here its deaths are no fault of its own


class ChaosDeployment:
    """Processes by role; gateway 0 is the streams' own, gateway 1 may die."""

    def __init__(self, settings: Settings, counts: dict[str, int], log_dir: Path) -> None:
        self.settings = settings
        self.starter = Starter(settings, log_dir)
        self.reports: list[str] = []
        cast = [Role(service, index) for service, count in counts.items() for index in range(count)]
        self.supervisor = Supervisor(
            cast,
            self.starter,
            report=self.reports.append,
            patience=settings.deployment.drain_timeout + KILL_AFTER,
            max_delay=MAX_DELAY,
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The kinds of fault and the services that they can befall; the one scheduler cannot be scaled."""
        services = sorted({child.role.service for child in self.supervisor.children})
        return [(kind, service) for service in services for kind in KINDS if (kind, service) != ("scale", "scheduler")]

    def own_channel(self) -> Any:
        """A connection to the gateway that is spared."""
        return grpc.aio.insecure_channel(self._address(0))

    def other_channel(self) -> Any:
        """A connection to a gateway that may die."""
        return grpc.aio.insecure_channel(self._address(1))

    async def load(self) -> Any:
        return await settled_load(self._address(0))

    async def inflict(self, fault: Fault) -> None:
        """Do it; returns once the worst is over (a frozen service is awake or dead)."""
        children = [child for child in self.supervisor.cast(fault.service) if child.alive]
        if fault.service == "gateway":
            children = [child for child in children if child.role.index > 0]  # the first has the streams
        if fault.kind == "scale":
            self._scale(fault.service)
        elif children:
            await self._harm(children[fault.which % len(children)], fault)

    async def _harm(self, child: ChildProcess, fault: Fault) -> None:
        if fault.kind == "kill":
            self.signal(child, signal.SIGKILL)
        elif fault.kind == "restart":
            self.supervisor.dismiss(child, replace=True)
        else:
            self.signal(child, signal.SIGSTOP)
            await asyncio.sleep(fault.duration)
            self.signal(child, signal.SIGKILL if fault.is_deadly else signal.SIGCONT)

    def _scale(self, service: str) -> None:
        """One more, or one less where there are as many as there should be."""
        present = len(self.supervisor.cast(service))
        self.supervisor.scale(service, present + 1 if present < MOST[service] else present - 1)

    def _address(self, gateway: int) -> str:
        return f"{self.settings.gateway.host}:{self.settings.gateway.port + gateway}"

    async def run(self) -> None:
        """Look after the processes, for ever."""
        while True:
            self.supervisor.poll()
            await asyncio.sleep(TURN)

    async def until_ready(self) -> None:
        """Raises TimeoutError where somebody does not get ready."""
        async with asyncio.timeout(READY_SECONDS):
            while not all(self.starter.is_ready(child) for child in self.supervisor.children):  # noqa: ASYNC110
                await asyncio.sleep(TURN)

    def signal(self, child: ChildProcess, number: signal.Signals) -> None:
        if isinstance(child.process, subprocess.Popen) and child.alive:
            os.kill(child.process.pid, number)


@asynccontextmanager
async def deployed(settings: Settings, counts: dict[str, int], log_dir: Path) -> AsyncIterator[ChaosDeployment]:
    """Started and ready; all gone at the end."""
    deployment = ChaosDeployment(settings, counts, log_dir)
    deployment.supervisor.start()
    looking = asyncio.create_task(deployment.run())
    try:
        await deployment.until_ready()
        yield deployment
    finally:
        looking.cancel()
        for child in deployment.supervisor.children:
            deployment.signal(child, signal.SIGCONT)
        deployment.supervisor.stop(settings.deployment.drain_timeout)


def consecutive_ports() -> int:
    """The first of two ports that are free."""
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port
