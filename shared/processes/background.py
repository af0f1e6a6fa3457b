"""A bounded queue whose items its own thread delivers: no event loop waits for a disk or for a reader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

REST = 0.01  # seconds after a delivery: what comes meanwhile is delivered together, and costs its sender no wake-up
POLL = 0.002  # seconds between looks of `drain`


class BackgroundQueue(Generic[T]):
    """Items are delivered in order, as many at once as wait.  `put` never waits and never raises.

    Once full, the queue refuses all until half of it is delivered; `on_gap` then gets the number of refused items,
    and what it returns takes their place.  An item larger than the bound is taken when nothing else waits.

    Invariant: what waits and what is being delivered together hold `max_items` and `max_bytes` at most, but for that.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[list[T]], None],
        *,
        max_items: int,
        max_bytes: int,
        on_gap: Callable[[int], list[tuple[T, int]]],
    ) -> None:
        """`deliver` runs in the queue's own thread and handles its own errors; `on_gap` returns items with sizes."""
        self._name = name
        self._deliver = deliver
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._on_gap = on_gap
        self._lock = threading.RLock()  # a finalizer that logs may interrupt `put` in its own thread
        self._bell = threading.Lock()  # held until there is something to take
        self._bell.acquire()
        self._thread: threading.Thread | None = None
        self._is_idle = True  # the thread waits for the bell
        self._items: list[T] = []
        self._sizes: list[int] = []
        self._num_items = 0  # with those under delivery
        self._num_bytes = 0
        self._num_refused = 0  # since the last call of `on_gap`

    def put(self, item: T, size: int) -> bool:
        """Queue an item of `size` bytes; False where it is refused."""
        with self._lock:
            if self._num_refused or (
                self._num_items and (self._num_items >= self._max_items or self._num_bytes + size > self._max_bytes)
            ):
                self._num_refused += 1
                return False
            self._append(item, size)
            if self._is_idle:
                self._is_idle = False
                self._ring()
            return True

    @property
    def is_empty(self) -> bool:
        """Whether everything is delivered."""
        return not self._num_items

    def drain(self, seconds: float) -> bool:
        """Wait until everything is delivered, at most so long; whether it is."""
        deadline = time.monotonic() + seconds
        while not self.is_empty:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)
        return True

    def _append(self, item: T, size: int) -> None:
        self._items.append(item)
        self._sizes.append(size)
        self._num_items += 1
        self._num_bytes += size

    def _ring(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give, now: the next item asks again
                self._is_idle = True
                return
            self._thread = thread
        self._bell.release()

    def _run(self) -> None:
        while True:
            self._bell.acquire()
            while batch := self._take():
                with contextlib.suppress(Exception):  # a defect there must not end all writing
                    self._deliver(batch[0])
                self._settle(*batch)
                time.sleep(REST)

    def _take(self) -> tuple[list[T], list[int]] | None:
        with self._lock:
            if not self._items:
                self._is_idle = True
                return None
            batch = self._items, self._sizes
            self._items, self._sizes = [], []
            return batch

    def _settle(self, items: list[T], sizes: list[int]) -> None:
        """Make room; report a gap, once there is so much room that the next gap is not near."""
        with self._lock:
            self._num_items -= len(items)
            self._num_bytes -= sum(sizes)
            is_roomy = self._num_items <= self._max_items // 2 and self._num_bytes <= self._max_bytes // 2
            if self._num_refused and is_roomy:
                count, self._num_refused = self._num_refused, 0
                with contextlib.suppress(Exception):
                    for item, size in self._on_gap(count):
                        self._append(item, size)
