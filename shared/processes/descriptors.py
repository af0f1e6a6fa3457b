"""File descriptors: how many this process may have, and a reserve for those that it cannot do without."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST = 1 << 16  # more would only make a leak harder to see
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def raise_limit(most: int = MOST) -> int:
    """Raise this process's soft limit to the hard one, or to `most`; children inherit it.  Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """How many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def is_exhausted(error: OSError) -> bool:
    """Whether this process or its machine has no descriptors or socket memory left: the far end is not to blame."""
    return error.errno in EXHAUSTED


class Spares:
    """Descriptors that are held open so that there is one to give up when the table is full.

    Safe in any thread: what is taken is taken by one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self.refill()

    def __len__(self) -> int:
        return len(self._held)

    def attempt(self, action: Callable[[], T]) -> T:
        """Do what needs one more descriptor.  Raises the action's OSError once no spare is left to give up."""
        self.refill()
        while True:
            try:
                return action()
            except OSError as error:
                if not is_exhausted(error) or not self._give_up():
                    raise

    def refill(self) -> None:
        """Hold as many again as there should be, as far as there is room."""
        while len(self._held) < self._count:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return

    def make_room(self, count: int) -> None:
        """Release so many at once, for a library that aborts where it finds no descriptor.  Raises OSError where there
        are not so many."""
        self.refill()
        if len(self._held) < count:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for _ in range(count):
            self._give_up()

    def close(self) -> None:
        self._count = 0
        while self._give_up():
            pass

    def _give_up(self) -> bool:
        try:
            os.close(self._held.pop())
        except IndexError:
            return False
        return True
