"""Starts the other ranks of a worker's group, as processes of this host, or opens the port where they join.

Without torch: they import it, and load their parts, while this process does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.worker.groups.group_sockets import group_socket_pair, send_group
from services.worker.hosts.listening import RankListener
from shared.config import Settings, load_settings, settings_environment
from shared.data_link.addresses import prepare
from shared.errors import PageantError
from shared.processes.logging import setup_logging
from shared.ranks.handshake import group_key

MOST_GROUPS, GROUPS_SECONDS = 4, 60.0  # that are formed of ranks which are left; then all begin anew
GPUS = "CUDA_VISIBLE_DEVICES"  # the CUDA driver's own
LAUNCH = Path(__file__).resolve().parents[2] / "cli" / "supervision" / "launch.py"


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
    lasting: LastingRanks | None = None  # whose processes may outlast this group; None: they end with it


@dataclass(frozen=True, slots=True)
class Started:
    """What has begun already of a worker's group."""

    others: StartedRanks | RankListener | None = None
    within: StartedRanks | None = None  # ranks of the leader's own stage, where stages are groups of ranks


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
    places = [(stage, rank) for rank in range(1, ranks)]
    numbers, are_linked = range(stage * ranks + 1, (stage + 1) * ranks), settings.engine.has_torch_ranks
    return LastingRanks(settings, places, numbers, are_linked=are_linked).next_group()


def _start_stages(settings: Settings) -> StartedRanks:
    """All but the last stage, which this process leads."""
    engine = settings.engine
    module = "services.worker.groups.stage" if engine.has_ranked_stages else "services.worker.groups.rank"
    stages = range(1, engine.pipeline_parallel_size)
    numbers = [stage * engine.tensor_parallel_size for stage in stages]
    places = [(stage, 0) for stage in stages]
    return LastingRanks(settings, places, numbers, module, are_linked=True).next_group()


@dataclass(slots=True)
class LastingRank:
    """A process, and this end of its socket (`services.worker.groups.group_sockets`)."""

    process: subprocess.Popen[bytes]
    end: socket.socket


class LastingRanks:
    """Processes of this host that are ranks of one group after the other, with this process, which leads them all."""

    def __init__(
        self,
        settings: Settings,
        places: Sequence[tuple[int, int]],  # stage and rank
        numbers: Sequence[int],
        module: str = "services.worker.groups.rank",
        *,
        are_linked: bool = False,
    ) -> None:
        self._settings = settings
        self._environment = os.environ | settings_environment(settings)
        self._places = places
        self._numbers = numbers
        self._module = module
        self._are_linked = are_linked
        self._ranks: list[LastingRank] = []
        self._groups: deque[float] = deque(maxlen=MOST_GROUPS)  # when the last ones were made

    @property
    def may_form_again(self) -> bool:
        """Whether ranks that are left keep what they have, unless groups have ended again and again.

        Experts that were moved are not where a rank that begins has them, stages number their orders together, and
        torch's ranks meet once.
        """
        engine = self._settings.engine
        able = not (engine.has_stages or engine.enable_eplb or engine.has_torch_ranks)
        is_soon = len(self._groups) == MOST_GROUPS and time.monotonic() - self._groups[0] < GROUPS_SECONDS
        return able and not is_soon

    def next_group(self) -> StartedRanks:
        """With those that are left of the last one, and others in the place of those that have ended."""
        self._groups.append(time.monotonic())
        memory = os.memfd_create("pageant-ranks")
        ends, links, ranks = [], [], []
        for index, place in enumerate(self._places):
            rank = self._ranks[index] if self._ranks else None
            if rank is not None and rank.process.poll() is not None:
                rank.end.close()
                rank = None
            rank = rank or self._begin(place)
            ranks.append(rank)
            pairs = [socket.socketpair(), *([link_pair()] if self._are_linked else [])]
            theirs = [their.fileno() for _, their in pairs]
            with contextlib.suppress(OSError):  # it has ended meanwhile, which its process will say
                send_group(rank.end, [theirs[0], memory, *theirs[1:]])
            for _, their in pairs:
                their.close()
            ends.append(pairs[0][0])
            links += [mine for mine, _ in pairs[1:]]
        self._ranks = ranks
        processes = tuple(one.process for one in ranks)
        return StartedRanks(memory, processes, tuple(ends), tuple(links), self._numbers, self)

    def dismiss(self) -> None:
        """They leave, once their group has ended."""
        for rank in self._ranks:
            rank.end.close()

    def _begin(self, place: tuple[int, int]) -> LastingRank:
        mine, theirs = group_socket_pair()
        program = [sys.executable, "-m", self._module, *map(str, (*place, theirs.fileno()))]
        command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *program]
        environment = self._environment
        if self._settings.engine.device == "cuda":
            environment = environment | own_gpu(place[1], environment)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        return LastingRank(process, mine)


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
