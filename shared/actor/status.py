"""A file that says how an actor is, for container health checks: its phase, renewed by its own message loop.

compose.yaml calls a container healthy while the file says READY or DRAINING and is younger than the heartbeat timeout.

A stuck loop stops renewing the file, so it turns unhealthy although the process lives.
"""

from __future__ import annotations

from pathlib import Path

from shared.config import Settings

STALLED = "STALLED"


def write_status(settings: Settings, status: str) -> None:
    """Renew the file; nothing happens where none is configured."""
    if settings.status_file:
        Path(settings.status_file).write_text(status, encoding="ascii")
