"""Long texts are tokenized in threads, in turn for each tenant, so that no tenant waits for another's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.fairness.fair_slots import FairSlots

T = TypeVar("T")

LONG_TEXT = 16 << 10  # characters; about 10 ms of tokenizing, the most that others should wait for
CHARS_PER_ID = 4  # of a text that is to be made of ids


class Lane:
    """Some threads, and those that wait for them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.slots = FairSlots(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)

    async def run(self, tenant: str, num_chars: int, work: Callable[[], T]) -> T:
        """Do `work` on so many characters: at once, or in a thread while others go on."""
        return work() if num_chars <= LONG_TEXT else await self.turn(tenant, work)

    async def turn(self, tenant: str, work: Callable[[], T]) -> T:
        """What `work` returns, once it has had its turn in a thread."""
        async with self.slots.turn(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
