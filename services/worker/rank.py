"""A rank that does not lead: `python -m services.worker.rank STAGE RANK CHANNEL MEMORY [LINK]`, all but the
first two descriptors.

It loads its part of the model and computes what the leader orders.  It is not on the bus.
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

import structlog

from engine.description.ranks import Place
from engine.loading.load import load_runner
from engine.loading.ranks import FollowingRank, RankReady
from engine.loading.stages import StageRanks
from shared.config import load_settings
from shared.errors import FatalError, PageantError
from shared.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.logging import setup_logging
from shared.ranks.channel import Channel

log = structlog.get_logger()


def follow(
    load: Callable[[FollowingRank], object],
    ranks: FollowingRank,
    *,
    patience: float = math.inf,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Until the group ends; returns the exit status.  `load` makes a rank's model; `patience`: seconds in which the
    leader must show signs of life."""
    ranks.channel.beat()
    try:
        load(ranks)
    except PageantError as error:
        log.error("fatal", error=str(error), type=type(error).__name__)
        with contextlib.suppress(FatalError):  # the leader may be what has ended
            ranks.channel.send(RankReady(ranks.number, error=str(error)))
        return EXIT_FATAL if isinstance(error, FatalError) else EXIT_CONFIG
    assert ranks.model is not None
    threading.Thread(target=_end_with_leader, args=(ranks.channel, patience), name="leader", daemon=True).start()
    log.info("rank_ready", rank=ranks.number, ranks=ranks.place.ranks)
    on_ready()
    try:
        reason = ranks.model.follow()
    except FatalError as error:
        log.error("fatal", error=str(error), type=type(error).__name__)
        return EXIT_FATAL
    log.info("rank_leaves", rank=ranks.number, reason=reason)
    return 0


def _end_with_leader(channel: Channel, patience: float) -> None:
    error = channel.watch(patience)
    log.info("rank_ends", reason=str(error))
    os._exit(EXIT_FATAL)


def main() -> int:
    stage, rank, channel, memory, *links = map(int, sys.argv[1:])
    settings = load_settings()
    engine, observation = settings.engine, settings.observation
    number = stage * engine.tensor_parallel_size + rank
    setup_logging("rank", f"rank-{number}", level=observation.log_level, format=observation.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the leader, and the leader this one
    end = Channel(socket.socket(fileno=channel), "the leader")
    place = Place(rank, engine.tensor_parallel_size) if rank else Place(stage, engine.pipeline_parallel_size)
    own = FollowingRank(place, end, memory, links, number)
    seat = StageRanks(Place(stage, engine.pipeline_parallel_size), own, None) if engine.has_ranked_stages else own
    return follow(lambda _: load_runner(settings, ranks=seat), own)


if __name__ == "__main__":
    sys.exit(main())
