"""Slots that tasks wait for, fair between owners: no owner waits for another owner's queue."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Owners that wait take turns, each with its oldest request; an owner holds at most `per_owner` places at a time.

    Invariant: while a place is free, only owners wait that hold as many as they may.
    """

    def __init__(self, num_places: int, per_owner: int = 0) -> None:
        """`per_owner`: 0 means all places."""
        self._num_free = num_places
        self._per_owner = per_owner or num_places
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def num_waiting_of(self, owner: str) -> int:
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Have a place within the block."""
        await self._take(owner)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _take(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._deal()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given a place just then
                self._give_back(owner)
            else:
                self._leave(owner, turn)
            raise

    def _give_back(self, owner: str) -> None:
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._deal()

    def _deal(self) -> None:
        """Give free places to the owners whose turn it is."""
        while self._num_free and (owner := self._next()) is not None:
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():
                self._num_free -= 1
                self._held[owner] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        return next((owner for owner in self._waiting if self._held[owner] < self._per_owner), None)

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[owner]
