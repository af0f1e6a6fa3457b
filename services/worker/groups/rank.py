"""A rank that does not lead: `python -m services.worker.groups.rank STAGE RANK SOCKET`, the last one a descriptor.

It loads its part of the model and computes what the leader orders.  It is not on the bus.  Where its group ends because
another rank has, it keeps its part, and waits for the next group (`services.worker.groups.group_sockets`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

import structlog

from engine.description.ranks import Place
from engine.loading.load import load_runner
from engine.loading.rank_adapters import HoldAdapter
from engine.loading.ranks import FollowingRank, RankReady
from engine.loading.reading import KeptPart
from engine.loading.stages import StageRanks
from kernels.cpu.binding import abi
from kernels.cpu.binding.ranks import why_ended
from services.worker.adapters import NICENESS
from services.worker.groups.group_sockets import close_all, wait_for_group
from shared.config import load_settings
from shared.errors import FatalError, PageantError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL, leave
from shared.processes.idle_time import give_way
from shared.processes.logging import setup_logging
from shared.ranks.channel import Channel

ANOTHER_GROUP = -1
GOES_ON = (abi.LEFT, abi.RANK_DIED, abi.RANK_SILENT)  # why groups end whose ranks may be in another one

log = structlog.get_logger()


def follow(
    load: Callable[[], object],
    ranks: FollowingRank,
    *,
    patience: float = math.inf,
    on_ready: Callable[[], None] = lambda: None,
    stays: bool = False,
) -> int:
    """Until the group ends; returns the exit status, or ANOTHER_GROUP where one may follow and the rank `stays`.
    `load` makes a rank's model; `patience`: seconds in which the leader must show signs of life."""
    ranks.channel.beat()
    try:
        load()
    except PageantError as error:
        log.error("fatal", error=str(error), type=type(error).__name__)
        if isinstance(error, FatalError) and stays:  # a group that ended before it was one
            return ANOTHER_GROUP
        with contextlib.suppress(FatalError):  # the leader may be what has ended
            ranks.channel.send(RankReady(ranks.number, error=str(error)))
        return EXIT_FATAL if isinstance(error, FatalError) else EXIT_CONFIG
    assert ranks.model is not None
    end = ranks.model.end if stays else lambda _: os._exit(EXIT_FATAL)
    threading.Thread(target=_hear_leader, args=(ranks, patience, end), name="leader", daemon=True).start()
    log.info("rank_ready", rank=ranks.number, ranks=ranks.place.ranks)
    on_ready()
    try:
        reason = ranks.model.follow()
    except FatalError as error:
        log.error("fatal", error=str(error), type=type(error).__name__)
        return EXIT_FATAL
    log.info("rank_leaves", rank=ranks.number, reason=reason)
    return ANOTHER_GROUP if stays and reason in map(why_ended, GOES_ON) else 0


def _hear_leader(ranks: FollowingRank, patience: float, end: Callable[[int], None]) -> None:
    """Until it ends, and then this rank does; what it orders beside steps another thread does."""
    try:
        while True:
            order = ranks.channel.receive(HoldAdapter, patience=patience)
            threading.Thread(target=_hold_adapter, args=(ranks, order), name="adapters", daemon=True).start()
    except FatalError as error:
        log.info("rank_ends", reason=str(error))
        end(abi.RANK_DIED)


def _hold_adapter(ranks: FollowingRank, order: HoldAdapter) -> None:
    give_way(NICENESS)
    answer = ranks.hold(order)
    with contextlib.suppress(FatalError):  # the leader has ended
        ranks.channel.send(answer)


def main() -> int:
    stage, rank, descriptor = map(int, sys.argv[1:])
    settings = load_settings()
    engine, observation = settings.engine, settings.observation
    number = stage * engine.tensor_parallel_size + rank
    setup_logging("rank", f"rank-{number}", level=observation.log_level, format=observation.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the leader, and the leader this one
    place = Place(rank, engine.tensor_parallel_size) if rank else Place(stage, engine.pipeline_parallel_size)
    kept, groups = KeptPart(), socket.socket(fileno=descriptor)
    while descriptors := wait_for_group(groups):
        channel, memory, *links = descriptors
        end = Channel(socket.socket(fileno=channel), "the leader")
        own = FollowingRank(place, end, memory, links, number)
        whole = StageRanks(Place(stage, engine.pipeline_parallel_size), own, None) if engine.has_ranked_stages else own
        status = follow(partial(load_runner, settings, ranks=whole, kept=kept), own, stays=True)
        end.close()
        close_all([memory, *links])
        if status != ANOTHER_GROUP:
            return status
    return 0


if __name__ == "__main__":
    leave(main())
