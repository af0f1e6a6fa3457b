"""One place, given to the waiting task of the least rank; ranks are computed when the place becomes free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class RankedTurns:
    """One turn at a time; the least rank is next, and of equal ones the first that came.

    Invariant: a turn is somebody's as long as anybody waits.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[asyncio.Future[None], Callable[[], Any]] = {}  # ranks, in the order of arrival

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, rank: Callable[[], Any]) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block."""
        if self._is_taken:
            await self._wait(rank)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, rank: Callable[[], Any]) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = rank
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # its turn came just now
                self._pass_on()
            raise
        finally:
            self._waiting.pop(place, None)

    def _pass_on(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._waiting:
            place = min(self._waiting, key=lambda waiting: self._waiting[waiting]())
            del self._waiting[place]
            place.set_result(None)
