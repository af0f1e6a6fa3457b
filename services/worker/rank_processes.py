"""Starts the other ranks of a worker's group, as processes of this host, or opens the port where they join.

Without torch: they import it, and load their parts, while this process does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.worker.hosts.listening import RankListener
from shared.config import Settings, load_settings, settings_environment
from shared.data_link.addresses import prepare
from shared.errors import PageantError
from shared.logging import setup_logging
from shared.ranks.handshake import group_key

GPUS = "CUDA_VISIBLE_DEVICES"  # the CUDA driver's own
LAUNCH = Path(__file__).resolve().parents[1] / "cli" / "launch.py"


class RankProcess(Protocol):
    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Ranks 1, 2, ... in order, or the leaders of stages 1, 2, ..."""

    memory: int  # descriptor of the memory that all will share, empty as yet
    processes: tuple[RankProcess, ...]
    ends: tuple[socket.socket, ...]  # of the sockets that lead to them
    links: tuple[socket.socket, ...] = ()  # of those that residuals pass, where they are stages of a pipeline
    numbers: Sequence[int] = ()  # of these processes among all of the worker's, for logs; none: 1, 2, ...


@dataclass(frozen=True, slots=True)
class Started:
    """What has begun already of a worker's group."""

    others: StartedRanks | RankListener | None = None
    within: StartedRanks | None = None  # ranks of the leader's own stage, where stages are groups of ranks


def channel_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def link_pair() -> tuple[socket.socket, socket.socket]:
    """For data."""
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        prepare(end)
    return mine, theirs


def start_ranks(settings: Settings) -> Started:
    """Those that are processes of this host.

    They have these settings, die with this process, and log where it does.
    """
    engine = settings.engine
    is_local = engine.executor == "local"
    if engine.has_stages:
        within = start_stage(settings, 0) if engine.has_ranked_stages else None
        return Started(_start_stages(settings) if is_local else None, within)
    return Started(start_stage(settings, 0) if is_local and engine.ranks > 1 else None)


def start_stage(settings: Settings, stage: int) -> StartedRanks:
    """The ranks that share memory with this process, which leads them."""
    ranks = settings.engine.tensor_parallel_size
    numbers = range(stage * ranks + 1, (stage + 1) * ranks)
    places = [(stage, rank) for rank in range(1, ranks)]
    return _start(settings, "services.worker.rank", places, numbers, are_linked=settings.engine.has_torch_ranks)


def _start_stages(settings: Settings) -> StartedRanks:
    """All but the last stage, which this process leads."""
    engine = settings.engine
    module = "services.worker.stage" if engine.has_ranked_stages else "services.worker.rank"
    stages = range(1, engine.pipeline_parallel_size)
    numbers = [stage * engine.tensor_parallel_size for stage in stages]
    return _start(settings, module, [(stage, 0) for stage in stages], numbers, are_linked=True)


def _start(
    settings: Settings,
    module: str,
    places: Sequence[tuple[int, int]],  # stage and rank
    numbers: Sequence[int],
    *,
    are_linked: bool = False,
) -> StartedRanks:
    environment = os.environ | settings_environment(settings)
    memory, processes, ends, links = os.memfd_create("pageant-ranks"), [], [], []
    for stage, rank in places:
        pairs = [channel_pair(), *([link_pair()] if are_linked else [])]
        theirs = [their.fileno() for _, their in pairs]
        descriptors = [theirs[0], memory, *theirs[1:]]
        program = [sys.executable, "-m", module, *map(str, (stage, rank, *descriptors))]
        command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *program]
        own = environment | (own_gpu(rank, environment) if settings.engine.device == "cuda" else {})
        processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own, pass_fds=descriptors))
        for _, their in pairs:
            their.close()
        ends.append(pairs[0][0])
        links += [mine for mine, _ in pairs[1:]]
    return StartedRanks(memory, tuple(processes), tuple(ends), tuple(links), numbers)


def own_gpu(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What shows a rank its GPU alone; the leader, rank 0, uses the first of all."""
    visible = environment.get(GPUS, "")
    names = visible.split(",") if visible else [str(number) for number in range(rank + 1)]
    return {GPUS: names[rank] if rank < len(names) else ""}


def start_early() -> Started:
    """By the process's own settings; what is wrong with these is said where they are read again.

    Ranks that join from elsewhere find the port open, and load while this process does.
    """
    try:
        settings = load_settings()
        started = start_ranks(settings)
        if settings.engine.executor == "local" or settings.engine.members == 1:
            return started
        setup_logging("worker", "", level=settings.observation.log_level, format=settings.observation.log_format)
        return replace(started, others=RankListener(settings, group_key(settings.deployment.runtime_path)))
    except PageantError:
        return Started()
