"""A process's state as Linux reports it; empty on other systems."""

from __future__ import annotations

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")  # per second
PROC = Path("/proc")


def stat(pid: int) -> list[str] | None:
    """The fields after the command's name, from `state` on; None where the process is gone, or the system has none."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def own_seconds(fields: list[str]) -> float:
    """Processor time of the process that these are of, user and system together."""
    return (int(fields[11]) + int(fields[12])) / TICK


def wants_to_run(fields: list[str]) -> bool:
    """Whether the process runs, or would if it had a processor or its memory: it neither waits for others nor was
    stopped."""
    return fields[0] in "RD"
