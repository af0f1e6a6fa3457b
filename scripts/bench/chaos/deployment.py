"""A deployment of local processes, under the supervisor of `pageant serve`, in one event loop with its clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import control_pb2, control_pb2_grpc
from services.cli.processes import Starter
from services.cli.serve import free_port
from services.cli.supervisor import KILL_AFTER, Child, Role, Supervisor
from shared.config import Settings

TURN = 0.02  # seconds between the supervisor's looks
READY_SECONDS = 120.0
MAX_DELAY = 0.4  # seconds until a restart, however often a service was killed: here its deaths are no fault of its own


class Deployment:
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
            patience=settings.drain_timeout + KILL_AFTER,
            max_delay=MAX_DELAY,
        )

    def address(self, gateway: int) -> str:
        return f"{self.settings.host}:{self.settings.port + gateway}"

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

    def signal(self, child: Child, number: signal.Signals) -> None:
        if isinstance(child.process, subprocess.Popen) and child.alive:
            os.kill(child.process.pid, number)

    async def settled_load(self, seconds: float = 15.0) -> Any:
        """The scheduler's load once nothing runs or waits; as it is where that does not happen in time."""
        deadline = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self.address(0)) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            while True:
                load = await stub.GetLoad(control_pb2.GetLoadRequest(), timeout=5)
                if not (load.num_running or load.num_waiting) or time.monotonic() > deadline:
                    return load
                await asyncio.sleep(0.05)


@asynccontextmanager
async def deployed(settings: Settings, counts: dict[str, int], log_dir: Path) -> AsyncIterator[Deployment]:
    """Started and ready; all gone at the end."""
    deployment = Deployment(settings, counts, log_dir)
    deployment.supervisor.start()
    looking = asyncio.create_task(deployment.run())
    try:
        await deployment.until_ready()
        yield deployment
    finally:
        looking.cancel()
        for child in deployment.supervisor.children:
            deployment.signal(child, signal.SIGCONT)
        deployment.supervisor.stop(settings.drain_timeout)


def consecutive_ports() -> int:
    """The first of two ports that are free."""
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port
