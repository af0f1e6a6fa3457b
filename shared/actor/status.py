"""A file that says how an actor is, for container health checks: its phase, renewed by its own message loop.

compose.yaml calls a container healthy while the file says READY or DRAINING and is younger than the heartbeat timeout.

A stuck loop stops renewing the file, so it turns unhealthy although the process lives.
"""

from __future__ import annotations

import os
from pathlib import Path

from shared.config import Settings

STALLED = "STALLED"
WIDTH = 16  # bytes, of every status


def write_status(settings: Settings, status: str) -> None:
    """Renew the file; nothing happens where none is configured.

    It is written over and never made empty first: a file system that is mounted with `discard` (ext4) tells the disk of
    every block that becomes free, and whoever freed it, here a message loop, waits: up to half a second was seen.
    """
    if not settings.status_file:
        return
    file = os.open(settings.status_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, status.ljust(WIDTH - 1).encode("ascii") + b"\n")
    finally:
        os.close(file)


def read_status(path: Path) -> str:
    """What the file says; an empty string where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
