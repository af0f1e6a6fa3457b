"""How long streams paused after each fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from scripts.bench.chaos.faults import Inflicted
from scripts.bench.chaos.streams import Ear

FELT = 0.8  # seconds after which a fault is felt by whom it concerns
FLOWING = 0.75  # a stream that heard something within so many seconds flows
GIVEN_UP = 60.0


async def until_flowing(ears: Sequence[Ear]) -> None:
    """Return once every stream flows again, or after a minute: then the outputs tell what is wrong."""
    deadline = time.monotonic() + GIVEN_UP
    await asyncio.sleep(FELT)
    while time.monotonic() < deadline:
        now = time.monotonic()
        if all(ear.times and now - ear.times[-1] < FLOWING for ear in ears):
            return
        await asyncio.sleep(0.05)


def pauses(inflicted: Sequence[Inflicted], ears: Sequence[Ear], end: float) -> list[float]:
    """Per fault, the longest pause of any stream until the next fault."""
    ends = [following.begun for following in inflicted[1:]] + [end]
    return [
        max((ear.longest_pause(one.begun, until) for ear in ears), default=0.0)
        for one, until in zip(inflicted, ends, strict=True)
    ]


def percentile(values: Iterable[float], share: float) -> float:
    """By rank: the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1))]
