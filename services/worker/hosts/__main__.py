"""Run one rank that joins its leader over TCP: python -m services.worker.hosts tcp://HOST:PORT [RANK]"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import structlog

from services.worker.groups.stage import lead_stage
from services.worker.hosts.joining import JoinedGroup, join_group
from services.worker.hosts.messages import ANY
from shared.actor.status import write_last_words, write_status
from shared.config import DeploymentSettings, Settings, load_settings
from shared.errors import FatalError, PageantError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL, leave
from shared.processes.logging import setup_logging
from shared.ranks.channel import SILENCE
from shared.ranks.handshake import group_key

if TYPE_CHECKING:
    from engine.loading.ranks import FollowingRank

STATUS_SECONDS = 0.5

log = structlog.get_logger()


def main() -> int:
    """A group that ends, ends this process; whatever started it starts it again, and it joins the next group."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)  # at once, also within native code
    try:
        settings = load_settings()
    except PageantError as error:
        print(f"pageant: {error}", file=sys.stderr)
        return EXIT_CONFIG
    observation = settings.observation
    setup_logging("rank", "", level=observation.log_level, format=observation.log_format)
    try:
        address, number = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else ANY
        group = join_group(settings, address, group_key(settings.deployment.runtime_path), number)
        setup_logging("rank", f"rank-{group.rank}", level=observation.log_level, format=observation.log_format)
        return follow_group(group)
    except PageantError as error:
        log.error("fatal", error=str(error), type=type(error).__name__)
        write_last_words(settings.deployment, str(error))
        return EXIT_FATAL if isinstance(error, FatalError) else EXIT_CONFIG


def follow_group(group: JoinedGroup) -> int:
    """Compute what the leader orders until the group ends; returns the exit status."""

    def join() -> FollowingRank:
        from engine.description.ranks import Place
        from engine.loading.ranks import FollowingRank

        place, links = Place(group.rank, group.ranks), [group.link.fileno()]
        engine = group.settings.engine
        number = group.rank * (engine.tensor_parallel_size if engine.has_stages else 1)
        return FollowingRank(place, group.channel, group.memory, links, number)

    on_ready = partial(show_health, group.settings)
    if group.settings.engine.has_ranked_stages:
        return lead_stage(group.settings, group.rank, join, patience=SILENCE, on_ready=on_ready)

    from engine.loading.load import load_runner
    from services.worker.groups.rank import follow

    ranks = join()
    return follow(lambda: load_runner(group.settings, ranks=ranks), ranks, patience=SILENCE, on_ready=on_ready)


def show_health(settings: Settings) -> None:
    """For container health checks, in a thread, as long as this process lives."""
    if settings.deployment.status_file:
        threading.Thread(target=_keep_status, args=(settings.deployment,), name="status", daemon=True).start()


def _keep_status(settings: DeploymentSettings) -> None:
    while True:
        with contextlib.suppress(OSError):  # a file that grows old is an unhealthy container
            write_status(settings, "READY")
        threading.Event().wait(STATUS_SECONDS)


if __name__ == "__main__":
    leave(main())
