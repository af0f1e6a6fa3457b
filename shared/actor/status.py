"""A file that says how an actor is, for container health checks: its phase, renewed by its own message loop.

    python -m shared.actor.status        exit 0 while the service of this container is ready and its loop turns

A stuck loop stops renewing the file, so it turns unhealthy although the process lives.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shared.config import Settings, load_settings


def write_status(settings: Settings, phase: str) -> None:
    """Renew the file; nothing happens where none is configured."""
    if settings.status_file:
        Path(settings.status_file).write_text(phase, encoding="ascii")


def read_status(settings: Settings, now: float) -> str:
    """The phase, or "silent" where the file is missing or older than the heartbeat timeout."""
    path = Path(settings.status_file)
    try:
        age = now - path.stat().st_mtime
        return path.read_text(encoding="ascii") if age < settings.heartbeat_timeout else "silent"
    except OSError:
        return "silent"


if __name__ == "__main__":
    status = read_status(load_settings(), time.time())
    print(status)
    sys.exit(status not in ("READY", "DRAINING"))
