"""A deployment of local processes, under the supervisor of `pageant serve`, in one event loop with its clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2

from scripts.bench.chaos.faults import Fault, FaultStage
from scripts.bench.common.deployment import signal_all
from scripts.bench.common.proc import tree
from services.cli.supervision.processes import METRICS_PORTS, PLACES, Starter, start_fork_servers
from services.cli.supervision.supervisor import KILL_AFTER, ChildProcess, Role, Supervisor
from shared.config import Settings

RANK = "rank"
FETCHED = re.compile(r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", re.MULTILINE)
TURN = 0.02  # seconds between the supervisor's looks
READY_SECONDS = 120.0
MAX_DELAY = 0.4  # seconds until a restart, however often a service was killed: here its deaths are no fault of its own


class ChaosDeployment(FaultStage):
    """Processes by role; gateway 0 is the streams' own, gateway 1 may die.  A `rank` is one that a worker leads."""

    kinds = ("kill", "freeze", "restart", "scale")

    def __init__(self, settings: Settings, counts: dict[str, int], log_dir: Path, num_prefill: int = 0) -> None:
        """`num_prefill`: workers that compute prompts for the others; 0: all do everything."""
        super().__init__(f"{settings.gateway.host}:{settings.gateway.port}", counts)
        self._other = f"{settings.gateway.host}:{settings.gateway.port + 1}"
        self._settings = settings
        self.fork_servers = start_fork_servers()
        self.starter = Starter(settings, log_dir, partial(settings_of, settings, num_prefill), self.fork_servers)
        self.num_fetched_tokens = 0  # that came to workers as blocks, in all lives of the scheduler
        self._num_fetched_before = 0  # of those, in this life
        self.supervisor = Supervisor(
            [Role(service, index) for service, count in counts.items() if service != RANK for index in range(count)],
            self.starter,
            report=lambda _: None,
            patience=settings.deployment.drain_timeout + KILL_AFTER,
            max_delay=MAX_DELAY,
        )

    def own_channel(self) -> Any:
        return grpc.aio.insecure_channel(self.address)

    def other_channel(self) -> Any:
        return grpc.aio.insecure_channel(self._other)

    async def count_moves(self) -> None:
        """Add what was fetched since the last time; the count of a scheduler that has died since is lost."""
        if not self._settings.observation.metrics_port:
            return
        port = self._settings.observation.metrics_port + METRICS_PORTS * PLACES.index("scheduler")
        try:
            async with httpx2.AsyncClient(timeout=2.0, trust_env=False) as client:
                page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        except httpx2.HTTPError:
            return
        found = FETCHED.search(page)
        count = int(float(found[1])) if found else 0
        self.num_fetched_tokens += count - self._num_fetched_before if count >= self._num_fetched_before else count
        self._num_fetched_before = count

    async def harm(self, fault: Fault) -> None:
        if fault.kind == "restart":
            if children := self._victims(fault.service):
                self.supervisor.dismiss(children[fault.which % len(children)], replace=True)
            return
        if fault.service == RANK:
            leaders = [child.pid for child in self.supervisor.cast("worker") if child.pid]
            pids = [pid for one in leaders for pid in tree(one)[1:]]
        else:
            pids = [child.pid for child in self._victims(fault.service) if child.pid]
        if not pids:
            return
        pid = pids[fault.which % len(pids)]
        with contextlib.suppress(ProcessLookupError):  # it may end meanwhile: a rank with its group
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind == "freeze":
                await asyncio.sleep(fault.duration)
                os.kill(pid, signal.SIGKILL if fault.is_deadly else signal.SIGCONT)

    def _victims(self, service: str) -> list[ChildProcess]:
        """The live processes of a service, without the streams' own gateway."""
        children = [child for child in self.supervisor.cast(service) if child.alive]
        return [child for child in children if service != "gateway" or child.role.index > 0]

    async def set_count(self, service: str) -> None:
        self.supervisor.scale(service, self.counts[service])

    async def run(self) -> None:
        """Look after the processes, for ever."""
        while True:
            self.supervisor.poll()
            await asyncio.sleep(TURN)

    async def until_ready(self) -> None:
        """Raises TimeoutError where a process does not get ready."""
        async with asyncio.timeout(READY_SECONDS):
            while not all(self.starter.is_ready(child) for child in self.supervisor.children):  # noqa: ASYNC110
                await asyncio.sleep(TURN)


def settings_of(settings: Settings, num_prefill: int, role: Role) -> Settings:
    if role.service != "worker" or not num_prefill:
        return settings
    return settings.replace(worker_role="prefill" if role.index < num_prefill else "decode")


@asynccontextmanager
async def deployed(
    settings: Settings, counts: dict[str, int], log_dir: Path, num_prefill: int = 0
) -> AsyncIterator[ChaosDeployment]:
    """Started and ready; all gone at the end."""
    deployment = ChaosDeployment(settings, counts, log_dir, num_prefill)
    deployment.supervisor.start()
    looking = asyncio.create_task(deployment.run())
    try:
        await deployment.until_ready()
        yield deployment
    finally:
        looking.cancel()
        signal_all([child.pid for child in deployment.supervisor.children if child.pid], signal.SIGCONT)
        deployment.supervisor.stop(settings.deployment.drain_timeout)
        deployment.fork_servers.close()
