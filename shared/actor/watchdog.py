"""A thread that notices an event loop that is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

LOOKS = 5  # within the timeout


class Watched(Protocol):
    """An actor.  Timers are messages to itself, so that its progress grows even when no other message comes."""

    @property
    def progress(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """Whether its run loop has ended."""


class Watchdog:
    """Calls `on_stall` once when the loop has not handled a message for `timeout` seconds, `on_recovery` when it has.

    Both are called in the watchdog's own thread.  Before its first message an actor is loading, which may take long.
    """

    def __init__(
        self, actor: Watched, timeout: float, *, on_stall: Callable[[], None], on_recovery: Callable[[], None]
    ) -> None:
        self._actor = actor
        self._timeout = timeout
        self._turn = timeout / LOOKS
        self._on_stall = on_stall
        self._on_recovery = on_recovery
        self._progress = 0
        self._since = self._looked = time.monotonic()
        self._stalled = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _loop(self) -> None:
        while not self._ended.wait(self._turn):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Judge the loop by its progress since the last look.

        Where this thread itself was held up, the whole process was: frozen, or on a machine that had no time for it.
        """
        progress, held_up = self._actor.progress, now - self._looked > 2 * self._turn
        self._looked = now
        if progress == 0 or progress != self._progress or held_up or self._actor.is_over:
            self._progress, self._since = progress, now
            if self._stalled:
                self._stalled = False
                self._on_recovery()
        elif not self._stalled and now - self._since >= self._timeout:
            self._stalled = True
            self._on_stall()
