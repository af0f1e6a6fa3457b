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


def channel_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def start_ranks(settings: Settings) -> StartedRanks | None:
    """With these settings; they die with this process, and log where it does.  None where there are none to start."""
    ranks = settings.engine.ranks_here
    if ranks == 1:
        return None
    environment = os.environ | settings_environment(settings)
    memory, processes, ends = os.memfd_create("pageant-ranks"), [], []
    for rank in range(1, ranks):
        mine, theirs = channel_pair()
        program = [sys.executable, "-m", "services.worker.rank", *map(str, (rank, ranks, theirs.fileno(), memory))]
        command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *program]
        descriptors = theirs.fileno(), memory
        processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors))
        theirs.close()
        ends.append(mine)
    return StartedRanks(memory, tuple(processes), tuple(ends))


def start_early() -> StartedRanks | RankListener | None:
    """By the process's own settings; what is wrong with these is said where they are read again.

    Ranks that join from elsewhere find the port open, and load while this process does.
    """
    try:
        settings = load_settings()
        if settings.engine.tensor_parallel_size == settings.engine.ranks_here:
            return start_ranks(settings)
        setup_logging("worker", "", level=settings.observation.log_level, format=settings.observation.log_format)
        return RankListener(settings, group_key(settings.deployment.runtime_path))
    except PageantError:
        return None
