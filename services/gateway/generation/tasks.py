"""Awaiting with a deadline, and awaiting several of which the first that fails ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from shared.clock import steady_time
from shared.errors import RejectCode, RequestError

T = TypeVar("T")


async def all_or_none(works: Sequence[Awaitable[None]]) -> None:
    """Await all; the first RequestError cancels the others and is the one that is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def within(deadline: float | None, work: Awaitable[T]) -> T:
    """Await `work` until `deadline` (of the steady clock); raises RequestError past it."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline - steady_time()):
            return await work
    except TimeoutError:
        raise RequestError("the call's deadline passed", code=RejectCode.DEADLINE_EXCEEDED) from None
