"""Numbers that say what is newer, without a clock: of a scheduler's lives, and within each of its links.

A life has SPAN numbers.  One is its own, in rosters; those after it are given to its links, to workers and drafts, as
they begin.  A later life has greater ones.  Nothing here is a time: a clock may be set back by days between two lives.
"""

from __future__ import annotations

from collections.abc import Callable

SPAN = 1 << 32  # numbers of one life
MAX_LEAP = 1024 * SPAN  # beyond the greatest number known; what is further is no successor's
LIMIT = 1 << 62  # the greatest number: far enough from that of an integer on the wire


def life_of(epoch: int) -> int:
    """Which life's a number is."""
    return epoch // SPAN


def is_late(epoch: int, known: int) -> bool:
    """Whether a link's number is of an earlier link than the one known, of the same life."""
    return epoch < known and life_of(epoch) == life_of(known)


def is_possible(epoch: int) -> bool:
    return 0 <= epoch <= LIMIT


def follows(epoch: int, known: int) -> bool:
    """Whether a number can be that of the life known, or of one after it; where none is known (0), of any."""
    return is_possible(epoch) and (not known or known <= epoch <= known + MAX_LEAP)


class EpochFollower:
    """Chooses the scheduler that this process follows.

    A scheduler whose number follows on the known one is believed at once.  Any other is an earlier life or a
    stranger, and is not believed while the known one is heard.  But numbers may be lost, with a directory or with the
    last process that kept them; so where the known one is silent for `patience` seconds, and only one other has been
    heard for as long, that one is believed.
    """

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self._known = 0
        self._heard_at = -patience  # the known one
        self._other = -1
        self._since = 0.0  # the other has been heard, and no third

    @property
    def is_heard(self) -> bool:
        """Whether the known one was heard within the patience."""
        return self._clock() - self._heard_at < self._patience

    def hear(self, epoch: int) -> bool:
        """Note the number of a scheduler; returns whether that scheduler is believed."""
        if not follows(epoch, self._known) and not self._persists(epoch):
            return False
        self._known, self._heard_at, self._other = epoch, self._clock(), -1
        return True

    def _persists(self, epoch: int) -> bool:
        now = self._clock()
        if epoch != self._other:
            self._other, self._since = epoch, now
        return is_possible(epoch) and not self.is_heard and now - self._since >= self._patience
