"""A file with an actor's phase, for container health checks: renewed by its own message loop.

compose.yaml calls a container healthy while the file says READY or DRAINING and is younger than 3 seconds.

A stuck loop stops renewing the file, so it turns unhealthy although the process lives.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

from shared.config import DeploymentSettings
from shared.processes.background import BackgroundQueue
from shared.processes.losses import STATUS, count_loss

log = structlog.get_logger()

STALLED = "STALLED"
WIDTH = 16  # bytes, of every status
MAX_WAITING = 8  # that are not written yet; only the newest of them is


class StatusFile:
    """The status of one process, renewed in the background: no disk delays the loop or ends the service.

    A file that cannot be written grows old, and health checks take it for unhealthy.
    """

    def __init__(self, settings: DeploymentSettings) -> None:
        self._settings = settings
        self._is_lost = False
        self._queue: BackgroundQueue[str] = BackgroundQueue(
            "status", self._deliver, max_items=MAX_WAITING, max_bytes=MAX_WAITING * WIDTH, on_gap=lambda _: []
        )

    def say(self, status: str) -> None:
        """Renew it; never waits and never raises."""
        if self._settings.status_file and not self._queue.put(status, WIDTH):
            count_loss(STATUS)

    def drain(self, seconds: float) -> bool:
        """Wait until the last status is written, for so long at most; returns whether it is."""
        return self._queue.drain(seconds)

    def _deliver(self, statuses: list[str]) -> None:
        try:
            write_status(self._settings, statuses[-1])
        except OSError as error:
            count_loss(STATUS)
            if not self._is_lost:
                log.warning("status_lost", file=self._settings.status_file, reason=str(error))
            self._is_lost = True
            return
        if self._is_lost:
            log.info("status_resumed", file=self._settings.status_file)
        self._is_lost = False


def write_status(settings: DeploymentSettings, status: str) -> None:
    """Renew the file; nothing happens where none is configured.  Raises OSError.

    It is written over and never made empty first: a file system that is mounted with `discard` (ext4) reports
    every freed block to the disk, and the message loop, which freed it, waits: up to half a second was seen.
    """
    if not settings.status_file:
        return
    file = os.open(settings.status_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, status.ljust(WIDTH - 1).encode("ascii") + b"\n")
    finally:
        os.close(file)


def write_last_words(settings: DeploymentSettings, words: str) -> None:
    """Beside the file: the error that ends the process, for its supervisor.  A full disk loses it."""
    if settings.status_file:
        with contextlib.suppress(OSError):
            words_path(Path(settings.status_file)).write_text(words, encoding="utf-8", errors="replace")


def words_path(status_file: Path) -> Path:
    return status_file.with_name(f"{status_file.name}.words")


def waits_path(status_file: Path) -> Path:
    """Beside the file: what a process waits for before it can begin."""
    return status_file.with_name(f"{status_file.name}.waits")


def write_waits(settings: DeploymentSettings, words: str) -> None:
    """For the supervisor: what the process waits for; nothing any more where `words` is empty."""
    if settings.status_file:
        path = waits_path(Path(settings.status_file))
        with contextlib.suppress(OSError):
            path.write_text(words, encoding="utf-8", errors="replace") if words else path.unlink(missing_ok=True)


def read_status(path: Path) -> str:
    """The content of the file; empty where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
