"""Unix time that never goes back: for time that is measured, and yet compared with what others say."""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds, as if the clock had not been set since this process began."""
    return _START + time.monotonic()
