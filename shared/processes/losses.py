"""What this process wanted to write and could not: counts by kind of output, for /metrics.

Log lines, recordings, incidents and status files have no common owner, and each may be lost in any thread.
"""

from __future__ import annotations

import threading
from collections import Counter

LOG, RECORDING, STEPS, INCIDENT, STATUS = KINDS = ("log", "recording", "steps", "incident", "status")

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_loss(kind: str, number: int = 1) -> None:
    """Lines, frames or files of this kind are lost."""
    with _lock:
        _counts[kind] += number


def losses() -> dict[str, int]:
    """Of every kind, how many were lost since the process began."""
    with _lock:
        return {kind: _counts[kind] for kind in KINDS}
