"""Run one worker group on Ray: python -m services.worker.ray

Asks Ray for a place for each rank, has them started there, and passes on what `pageant serve` says and hears: signals
to the leader, its status to the status file.  Ends when the group has, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from services.worker.ray.cluster import Places, connect
from services.worker.ray.group import PlacedGroup
from services.worker.ray.placed import keys_digest
from shared.actor.status import write_last_words, write_status, write_waits
from shared.config import DeploymentSettings, Settings, load_settings
from shared.errors import FatalError, PageantError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.processes.logging import setup_logging

FIRST_WORD, NEXT_WORD = 2.0, 30.0  # seconds of waiting until that is said, and said again

log = structlog.get_logger()


class Orders:
    """The signals of `pageant serve`, in order, each once: `ray job stop` sends them too, and a second one would end a
    worker at once.  Made when `ray.init` has taken them for itself."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._taken: set[int] = set()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._take)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is passed on by `pageant serve`, as SIGTERM

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number not in self._taken:
            self._taken.add(number)
            self.waiting.append(number)


def main() -> int:
    try:
        settings = load_settings()
    except PageantError as error:
        print(f"pageant: {error}", file=sys.stderr)
        return EXIT_CONFIG
    observation, deployment = settings.observation, settings.deployment
    setup_logging("worker", "ray", level=observation.log_level, format=observation.log_format)
    try:
        ray = connect(settings)
        try:
            status, words = place_and_watch(settings, ray, Orders())
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()
    except PageantError as error:
        status, words = EXIT_FATAL if isinstance(error, FatalError) else EXIT_CONFIG, str(error)
    if words:
        log.error("fatal", error=words)
        write_last_words(deployment, words)
    return status


def place_and_watch(settings: Settings, ray: Any, orders: Orders) -> tuple[int, str]:
    """Until the group has ended; returns the exit status, and why."""
    places = Places(settings)
    try:
        if not wait_for(places, settings.deployment, orders):
            return 0, ""
        actors = [places.actor(rank) for rank in range(settings.engine.ranks)]
        group = PlacedGroup(ray, actors)
        try:
            group.start(settings, keys_digest(settings.deployment.runtime_path))
            return watch(group, settings.deployment, orders)
        finally:
            group.end()
    finally:
        places.give_back()


def wait_for(places: Places, settings: DeploymentSettings, orders: Orders) -> bool:
    """False where the group is not wanted any more before it has a place."""
    next_word = time.monotonic() + FIRST_WORD
    while not places.are_there():
        if orders.waiting:
            return False
        if time.monotonic() >= next_word:
            next_word = time.monotonic() + NEXT_WORD
            lack = places.lack()
            log.warning("place_awaited", lack=lack)
            write_waits(settings, lack)
    write_waits(settings, "")
    return True


def watch(group: PlacedGroup, settings: DeploymentSettings, orders: Orders) -> tuple[int, str]:
    """The leader's status is the group's."""
    while group.look():
        while orders.waiting:
            group.signal(orders.waiting.pop(0))
        if state := group.leader.report.state:
            with contextlib.suppress(OSError):
                write_status(settings, state)
    return group.verdict()


if __name__ == "__main__":
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        exit_status = main()  # Ray writes pages there about what has died; our last line has the reason
    sys.exit(exit_status)
