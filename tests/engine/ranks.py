"""Groups of ranks for tests: forks of this process follow, which have torch and the library already."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from engine.description.ranks import Place
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.loading.ranks import FollowingRank
from engine.loading.stages import StageRanks
from services.worker.groups.rank import follow
from services.worker.groups.rank_processes import StartedRanks, link_pair
from services.worker.groups.ranks import HostGroup, RankGroup, StagesOfRanks
from services.worker.hosts.joining import join_group
from services.worker.hosts.listening import RankListener
from shared.config import Settings
from shared.ranks.channel import Channel
from tests.kernels.cpu.natives import load_build

PR_SET_PDEATHSIG = 1
KEY = b"k" * 32

# A fork that shows the progress of its loading takes tqdm's lock.  No thread of tqdm's own may hold it at a fork, nor
# may processes share it: one that is killed while it has it would leave the others to wait for ever.
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())


class ForkedRank:
    """A `services.worker.groups.rank_processes.RankProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # another thread has waited for it
            return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_ranks(settings: Settings, has_windows: bool, stage: int = 0) -> StartedRanks:
    """Those that share memory with this process."""
    count = settings.engine.tensor_parallel_size
    places = [(stage, Place(rank, count)) for rank in range(1, count)]
    return _fork_all(settings, has_windows, places, are_linked=settings.engine.has_torch_ranks)


def fork_stages(settings: Settings, has_windows: bool) -> StartedRanks:
    count = settings.engine.pipeline_parallel_size
    places = [(stage, Place(stage, count)) for stage in range(1, count)]
    return _fork_all(settings, has_windows, places, are_linked=True)


def _fork_all(
    settings: Settings, has_windows: bool, places: list[tuple[int, Place]], *, are_linked: bool = False
) -> StartedRanks:
    memory, processes = os.memfd_create("ranks"), []
    ends: list[socket.socket] = []
    leads: list[socket.socket] = []
    for stage, place in places:
        (mine, theirs), pairs = socket.socketpair(), [link_pair()] if are_linked else []
        others = [mine, *(own for own, _ in pairs), *ends, *leads]  # which a fork has too, and must not keep open
        end = partial(_local_end, place, theirs, memory, [link for _, link in pairs], others)
        processes.append(_fork(settings, end, has_windows, stage))
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


def _fork(settings: Settings, end: Callable[[], FollowingRank], has_windows: bool, stage: int) -> ForkedRank:
    def load(others: FollowingRank) -> ModelRunner:
        return load_runner(settings, ranks=_seat(settings, others, has_windows, stage), has_windows=has_windows)

    # A fork has no threads of an earlier test's team, and would end where it waited for theirs; as it would for those
    # of torch.distributed, if what has them was dropped there.
    gc.collect()
    load_build("native").set_threads(1, pin=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of threads
        pid = os.fork()
    if pid:
        return ForkedRank(pid)
    gc.freeze()  # nor may it take apart what earlier tests left: locks of their threads may be held for ever here
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        own = end()
        status = follow(partial(load, own), own)
    except BaseException:
        traceback.print_exc()
        status = 70
    os._exit(status)


def _seat(settings: Settings, own: FollowingRank, has_windows: bool, stage: int) -> FollowingRank | StageRanks:
    """As `services.worker.groups.stage` has it."""
    if not settings.engine.has_ranked_stages:
        return own
    if not own.links:
        return StageRanks(Place(stage, settings.engine.pipeline_parallel_size), own, None)
    within = RankGroup(fork_ranks(settings, has_windows, stage), on_failure=partial(os._exit, 70))
    within.above = own
    return StageRanks(own.place, within, own)


@contextmanager
def ranked(settings: Settings, ranks: int, has_windows: bool = True) -> Iterator[tuple[ModelRunner, RankGroup]]:
    """The leader's runner, and its group."""
    load_build("native")
    settings = settings.replace(tensor_parallel_size=ranks, num_threads=1)
    group = RankGroup(fork_ranks(settings, has_windows), on_failure=lambda: None)
    with _loaded(settings, group, has_windows) as runner:
        yield runner, group


@contextmanager
def staged(settings: Settings, stages: int, has_windows: bool = True) -> Iterator[tuple[ModelRunner, RankGroup]]:
    """The same of a pipeline."""
    load_build("native")
    settings = settings.replace(pipeline_parallel_size=stages, num_threads=1)
    group = RankGroup(fork_stages(settings, has_windows), on_failure=lambda: None)
    with _loaded(settings, group, has_windows) as runner:
        yield runner, group


@contextmanager
def ranked_stages(
    settings: Settings, stages: int, has_windows: bool = True, ranks: int = 2
) -> Iterator[tuple[ModelRunner, StagesOfRanks]]:
    """The same of a pipeline whose stages are groups of ranks."""
    load_build("native")
    settings = settings.replace(tensor_parallel_size=ranks, pipeline_parallel_size=stages, num_threads=1)
    others = RankGroup(fork_stages(settings, has_windows), on_failure=lambda: None)
    group = StagesOfRanks(RankGroup(fork_ranks(settings, has_windows), on_failure=lambda: None), others)
    with _loaded(settings, group, has_windows) as runner:
        yield runner, group


@contextmanager
def _loaded(settings: Settings, group: RankGroup | StagesOfRanks, has_windows: bool) -> Iterator[ModelRunner]:
    try:
        yield load_runner(settings, ranks=group, has_windows=has_windows)
    finally:
        group.close()


@contextmanager
def linked(
    settings: Settings, ranks: int, has_windows: bool = True, kind: str = "tensor_parallel_size"
) -> Iterator[tuple[ModelRunner, HostGroup, list[ForkedRank]]]:
    """The same over TCP: the leader's runner, its group, and the others, which join as if from other hosts.

    Stages are groups of ranks where the settings say so.
    """
    load_build("native")
    settings = settings.replace(**{kind: ranks}, num_threads=1, executor="hosts", rank_port=0)
    listener = RankListener(settings, KEY)
    address = f"tcp://127.0.0.1:{listener.port}"
    others = [
        _fork(settings, partial(_linked_end, settings, address, rank), has_windows, rank) for rank in range(1, ranks)
    ]
    group = HostGroup(listener, ranks, on_failure=lambda: None)
    whole: HostGroup | StagesOfRanks = group
    if settings.engine.has_ranked_stages:
        whole = StagesOfRanks(RankGroup(fork_ranks(settings, has_windows), on_failure=lambda: None), group)
    try:
        yield load_runner(settings, ranks=whole, has_windows=has_windows), group, others
    finally:
        whole.close()
        for one in others:
            one.kill()
            one.wait()
