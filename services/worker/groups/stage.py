"""The leader of a stage that is a group of ranks: `python -m services.worker.groups.stage STAGE 0 SOCKET`, the last
one a descriptor.

To the other stages it is one rank (`services.worker.groups.rank`); it starts the others of its stage itself, and ends
with them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from services.worker.groups.group_sockets import wait_for_group
from services.worker.groups.rank_processes import start_stage
from shared.config import Settings, load_settings
from shared.processes.exit_status import EXIT_FATAL, leave
from shared.processes.logging import setup_logging
from shared.ranks.channel import Channel

if TYPE_CHECKING:
    from engine.loading.ranks import FollowingRank


def lead_stage(settings: Settings, stage: int, join: Callable[[], FollowingRank], **options: Any) -> int:
    """Until the group ends; returns the exit status.  `join`: the way to the other stages; `options`: of `follow`."""
    started = start_stage(settings, stage)  # they import torch while this process does

    from engine.loading.load import load_runner
    from engine.loading.stages import StageRanks
    from services.worker.groups.rank import follow
    from services.worker.groups.ranks import RankGroup

    above, within = join(), RankGroup(started, on_failure=partial(os._exit, EXIT_FATAL))
    within.above, within.number = above, above.number
    seat = StageRanks(above.place, within, above)
    try:
        return follow(lambda: load_runner(settings, ranks=seat), above, **options)
    finally:
        within.close()


def main() -> int:
    stage, _, descriptor = map(int, sys.argv[1:])
    settings = load_settings()
    engine, observation = settings.engine, settings.observation
    number = stage * engine.tensor_parallel_size
    setup_logging("rank", f"rank-{number}", level=observation.log_level, format=observation.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the leader, and the leader this one

    descriptors = wait_for_group(socket.socket(fileno=descriptor))
    if not descriptors:
        return 0
    channel, memory, link = descriptors

    def join() -> FollowingRank:
        from engine.description.ranks import Place
        from engine.loading.ranks import FollowingRank

        end = Channel(socket.socket(fileno=channel), "the leader")
        return FollowingRank(Place(stage, engine.pipeline_parallel_size), end, memory, [link], number)

    return lead_stage(settings, stage, join)


if __name__ == "__main__":
    leave(main())
