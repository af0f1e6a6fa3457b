"""Tells an event loop when times have come, more exactly than its own timers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence


class Pacer:
    """Calls `due(index)` in the loop at each of the given times, from a thread that sleeps to within some tens of
    microseconds; the timers of event loops round up to milliseconds, which would go into every latency."""

    def __init__(self, times: Sequence[float], due: Callable[[int], None]) -> None:
        """`times` are of time.perf_counter, in order."""
        self._times, self._due = times, due
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nothing is due after this."""
        self._stopped.set()

    def _run(self) -> None:
        for index, moment in enumerate(self._times):
            if (left := moment - time.perf_counter()) > 0:
                time.sleep(left)
            if self._stopped.is_set():
                return
            self._loop.call_soon_threadsafe(self._due, index)
