"""A doubly linked list threaded through integer ids: every operation is O(1) for each id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FreeList:
    """Which of the ids 0 ... size - 1 are free, in the order in which they will be taken.

    Invariant: `_next` and `_prev` form one ring through the sentinel `size` and every free id, and no other.
    """

    def __init__(self, size: int) -> None:
        self._next: list[int] = [*range(1, size + 1), 0]
        self._prev: list[int] = [size, *range(size)]
        self._sentinel = size
        self.size = size  # how many are free

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        item = self._next[self._sentinel]
        while item != self._sentinel:
            yield item
            item = self._next[item]

    def __contains__(self, item: object) -> bool:
        """An id that was taken out is no neighbour of another any more, though its own links remain."""
        return isinstance(item, int) and self._next[self._prev[item]] == item

    def rebuild(self, items: Iterable[int]) -> None:
        """Forget everything; these distinct ids are free, in this order."""
        self._next = [self._sentinel] * (self._sentinel + 1)
        self._prev = self._next[:]
        self.size = 0
        self.extend(items)

    def take(self, count: int) -> list[int]:
        """Take the first `count` ids, of which there must be that many."""
        following, prev, sentinel, taken = self._next, self._prev, self._sentinel, []
        item = following[sentinel]
        for _ in range(count):
            taken.append(item)
            prev[item] = sentinel
            item = following[item]
        following[sentinel] = item
        prev[item] = sentinel
        self.size -= count
        return taken

    def remove(self, item: int) -> None:
        """Take an id out of the middle; it must be free."""
        before, after = self._prev[item], self._next[item]
        self._next[before] = after
        self._prev[after] = before
        self.size -= 1

    def extend(self, items: Iterable[int]) -> None:
        """Give ids back, to be taken last, in this order."""
        following, prev, before = self._next, self._prev, self._prev[self._sentinel]
        for item in items:
            following[before], prev[item] = item, before
            before = item
            self.size += 1
        following[before], prev[self._sentinel] = self._sentinel, before

    def extend_left(self, items: Iterable[int]) -> None:
        """Give ids back, to be taken first, the last of these before the others."""
        following, prev, after = self._next, self._prev, self._next[self._sentinel]
        for item in items:
            following[item], prev[after] = after, item
            after = item
            self.size += 1
        following[self._sentinel], prev[after] = after, self._sentinel
