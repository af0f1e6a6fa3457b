"""An actor's garbage that only a collection can free: it is collected before it is much."""

from __future__ import annotations

import asyncio
import gc
from collections import deque

import pytest

from shared.messages import TokenBatch
from shared.transport import MemoryTransport
from tests.unit.actor.test_actor import Echo, until

NUM_MESSAGES = 30_000
PER_MESSAGE = 10
NUM_OPEN = 3_000  # that are in use at a time, so that young collections find them so
MOST = 50_000  # of the 300,000 that there were


class Knot:
    """Names itself, as an error's trace and its frame name each other."""

    alive = 0

    def __init__(self) -> None:
        self.knot = self
        Knot.alive += 1

    def __del__(self) -> None:
        Knot.alive -= 1


class Litterer(Echo):
    def __init__(self, transport: MemoryTransport) -> None:
        super().__init__(transport)
        self.open: deque[Knot] = deque(maxlen=NUM_OPEN)
        self.num_messages = self.most = 0

    def handle_tokens(self, batch: TokenBatch) -> None:
        self.open.extend(Knot() for _ in range(PER_MESSAGE))
        self.num_messages += 1
        self.most = max(self.most, Knot.alive)


@pytest.mark.asyncio
async def test_what_names_itself_is_collected_before_it_is_much() -> None:
    thresholds = gc.get_threshold()
    network = MemoryTransport()
    actor = Litterer(network)
    running = asyncio.create_task(actor.run())
    try:
        for _ in range(NUM_MESSAGES):
            actor.post(TokenBatch([], []))
        await until(lambda: actor.num_messages == NUM_MESSAGES)
        assert NUM_OPEN <= actor.most <= MOST
    finally:
        actor.stop()
        actor.post(TokenBatch([], []))
        await running
        gc.set_threshold(*thresholds)
