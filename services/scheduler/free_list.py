"""A doubly linked list threaded through integer ids: every operation is O(1)."""

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
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        item = self._next[self._sentinel]
        while item != self._sentinel:
            yield item
            item = self._next[item]

    def __contains__(self, item: object) -> bool:
        """What was taken out is nobody's neighbour any more, though it remembers those that it had."""
        return isinstance(item, int) and self._next[self._prev[item]] == item

    def rebuild(self, items: Iterable[int]) -> None:
        """Forget everything; these distinct ids are free, in this order."""
        self._next = [self._sentinel] * (self._sentinel + 1)
        self._prev = self._next[:]
        self._size = 0
        for item in items:
            self.append(item)

    def pop(self) -> int:
        """Take the first id; the list must not be empty."""
        item: int = self._next[self._sentinel]
        self.remove(item)
        return item

    def remove(self, item: int) -> None:
        """Take an id out of the middle; it must be free."""
        before, after = self._prev[item], self._next[item]
        self._next[before] = after
        self._prev[after] = before
        self._size -= 1

    def append(self, item: int) -> None:
        """Give an id back, to be taken last."""
        self._insert(self._prev[self._sentinel], item)

    def prepend(self, item: int) -> None:
        """Give an id back, to be taken first."""
        self._insert(self._sentinel, item)

    def _insert(self, before: int, item: int) -> None:
        after = self._next[before]
        self._next[before], self._next[item] = item, after
        self._prev[after], self._prev[item] = item, before
        self._size += 1
