"""Starts the other ranks of a worker's group, as processes of this host, or opens the port where they join.

Without torch: they import it, and load their parts, while this process does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.worker.hosts.listening import RankListener
from shared.config import Settings, load_settings, settings_environment
from shared.data_link.addresses import prepare
from shared.errors import PageantError
from shared.logging import setup_logging
from shared.ranks.handshake import group_key

LAUNCH = Path(__file__).resolve().parents[1] / "cli" / "launch.py"


class RankProcess(Protocol):
    pid: int

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Ranks 1, 2, ... in order."""

    memory: int  # descriptor of the memory that all will share, empty as yet
    processes: tuple[RankProcess, ...]
    ends: tuple[socket.socket, ...]  # of the sockets that lead to them
    links: tuple[socket.socket, ...] = ()  # of those that residuals pass, where they are stages of a pipeline


def channel_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def link_pair() -> tuple[socket.socket, socket.socket]:
    """For data."""
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        prepare(end)
    return mine, theirs


def start_ranks(settings: Settings) -> StartedRanks | None:
    """With these settings; they die with this process, and log where it does.  None where there are none to start."""
    ranks = settings.engine.ranks_here
    if ranks == 1:
        return None
    environment = os.environ | settings_environment(settings)
    memory, processes, ends, links = os.memfd_create("pageant-ranks"), [], [], []
    for rank in range(1, ranks):
        pairs = [channel_pair(), *([link_pair()] if settings.engine.has_stages else [])]
        theirs = [their.fileno() for _, their in pairs]
        descriptors = [theirs[0], memory, *theirs[1:]]
        program = [sys.executable, "-m", "services.worker.rank", *map(str, (rank, ranks, *descriptors))]
        command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *program]
        processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors))
        for _, their in pairs:
            their.close()
        ends.append(pairs[0][0])
        links += [mine for mine, _ in pairs[1:]]
    return StartedRanks(memory, tuple(processes), tuple(ends), tuple(links))


def start_early() -> StartedRanks | RankListener | None:
    """By the process's own settings; what is wrong with these is said where they are read again.

    Ranks that join from elsewhere find the port open, and load while this process does.
    """
    try:
        settings = load_settings()
        if settings.engine.ranks == settings.engine.ranks_here:
            return start_ranks(settings)
        setup_logging("worker", "", level=settings.observation.log_level, format=settings.observation.log_format)
        return RankListener(settings, group_key(settings.deployment.runtime_path))
    except PageantError:
        return None
