"""Groups of ranks for tests: forks of this process follow, which have torch and the library already."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from engine.description.ranks import Place
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.loading.ranks import FollowingRank
from services.worker.hosts.joining import join_group
from services.worker.hosts.listening import RankListener
from services.worker.rank import follow
from services.worker.rank_processes import StartedRanks, channel_pair, link_pair
from services.worker.ranks import HostGroup, RankGroup
from shared.config import Settings
from shared.ranks.channel import Channel
from tests.kernels.natives import load_build

PR_SET_PDEATHSIG = 1
KEY = b"k" * 32


class ForkedRank:
    """A `services.worker.rank_processes.RankProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # another thread has waited for it
            return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_ranks(settings: Settings, ranks: int, has_windows: bool) -> StartedRanks:
    memory, processes = os.memfd_create("ranks"), []
    ends: list[socket.socket] = []
    leads: list[socket.socket] = []
    for rank in range(1, ranks):
        (mine, theirs), pairs = channel_pair(), [link_pair()] if settings.engine.has_stages else []
        others = [mine, *(own for own, _ in pairs), *ends, *leads]  # which a fork has too, and must not keep open
        end = partial(_local_end, Place(rank, ranks), theirs, memory, [link for _, link in pairs], others)
        processes.append(_fork(settings, end, has_windows))
        for their in (theirs, *(link for _, link in pairs)):
            their.close()
        ends.append(mine)
        leads += [own for own, _ in pairs]
    return StartedRanks(memory, tuple(processes), tuple(ends), tuple(leads))


def _local_end(
    place: Place, end: socket.socket, memory: int, own: list[socket.socket], others: list[socket.socket]
) -> FollowingRank:
    for other in others:
        other.close()
    links.extend(own)
    return FollowingRank(place, Channel(end), memory, [link.fileno() for link in own])


def _linked_end(settings: Settings, address: str, rank: int) -> FollowingRank:
    group = join_group(settings, address, KEY, rank)
    links.append(group.link)
    return FollowingRank(Place(group.rank, group.ranks), group.channel, group.memory, [group.link.fileno()])


links: list[socket.socket] = []  # of this fork, open as long as it lives


def _fork(settings: Settings, end: Callable[[], FollowingRank], has_windows: bool) -> ForkedRank:
    def load(others: FollowingRank) -> ModelRunner:
        return load_runner(settings, ranks=others, has_windows=has_windows)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of threads
        pid = os.fork()
    if pid:
        return ForkedRank(pid)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        status = follow(load, end())
    except BaseException:
        traceback.print_exc()
        status = 70
    os._exit(status)


@contextmanager
def ranked(settings: Settings, ranks: int, has_windows: bool = True) -> Iterator[tuple[ModelRunner, RankGroup]]:
    """The leader's runner, and its group."""
    load_build("native")
    settings = settings.replace(tensor_parallel_size=ranks, num_threads=1)
    group = RankGroup(fork_ranks(settings, ranks, has_windows), on_failure=lambda: None)
    try:
        yield load_runner(settings, ranks=group, has_windows=has_windows), group
    finally:
        group.close()


@contextmanager
def staged(settings: Settings, stages: int, has_windows: bool = True) -> Iterator[tuple[ModelRunner, RankGroup]]:
    """The same of a pipeline."""
    load_build("native")
    settings = settings.replace(pipeline_parallel_size=stages, num_threads=1)
    group = RankGroup(fork_ranks(settings, stages, has_windows), on_failure=lambda: None)
    try:
        yield load_runner(settings, ranks=group, has_windows=has_windows), group
    finally:
        group.close()


@contextmanager
def linked(
    settings: Settings, ranks: int, has_windows: bool = True, kind: str = "tensor_parallel_size"
) -> Iterator[tuple[ModelRunner, HostGroup, list[ForkedRank]]]:
    """The same over TCP: the leader's runner, its group, and the others, which join as if from other hosts."""
    load_build("native")
    settings = settings.replace(**{kind: ranks}, num_threads=1, executor="hosts", rank_port=0)
    listener = RankListener(settings, KEY)
    address = f"tcp://127.0.0.1:{listener.port}"
    others = [_fork(settings, partial(_linked_end, settings, address, rank), has_windows) for rank in range(1, ranks)]
    group = HostGroup(listener, ranks, on_failure=lambda: None)
    try:
        yield load_runner(settings, ranks=group, has_windows=has_windows), group, others
    finally:
        group.close()
        for one in others:
            one.kill()
            one.wait()
