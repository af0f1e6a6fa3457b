"""Awaiting with a deadline, and awaiting several of which the first that fails ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from shared.clocks.clock import steady_time
from shared.errors import RejectCode, RequestError

T = TypeVar("T")


async def all_or_none(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first RequestError cancels the others and is the one that is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* RequestError as failed:
        error = failed.exceptions[0]
    else:
        return
    raise error


async def within(deadline: float, work: Awaitable[T]) -> T:
    """Await `work` until `deadline` (of the steady clock); raises RequestError past it."""
    try:
        async with asyncio.timeout(deadline - steady_time()):
            return await work
    except TimeoutError:
        raise RequestError("the call's deadline passed", code=RejectCode.DEADLINE_EXCEEDED) from None
