"""FairSlots are taken one at a time, by rank; a task that gives up leaves none behind."""

from __future__ import annotations

import asyncio

from services.tokenizer.ranked_turns import RankedTurns


async def test_the_least_rank_is_next_and_of_equal_ones_the_first() -> None:
    turns, order, ranks = RankedTurns(), list[str](), {"a": 2, "b": 1, "c": 1, "d": 0}
    begin = asyncio.Event()

    async def first() -> None:
        async with turns.turn(lambda: 9):
            await begin.wait()

    async def take(name: str) -> None:
        async with turns.turn(lambda: ranks[name]):
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(first()), *(asyncio.create_task(take(name)) for name in ranks)]
    await asyncio.sleep(0)
    assert len(turns) == 4
    ranks["d"] = 3  # ranks are asked for when a turn ends
    begin.set()
    await asyncio.gather(*tasks)
    assert order == ["b", "c", "a", "d"]
    assert not len(turns)


async def test_who_is_cancelled_gives_its_turn_to_the_next() -> None:
    turns, begin, served = RankedTurns(), asyncio.Event(), list[int]()

    async def first() -> None:
        async with turns.turn(lambda: 0):
            await begin.wait()

    async def take(number: int) -> None:
        async with turns.turn(lambda: 0):
            served.append(number)

    head = asyncio.create_task(first())
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()  # while it waits
    begin.set()
    await asyncio.sleep(0)  # the turn is given to 0 ...
    tasks[0].cancel()  # ... which goes before it has begun with it
    await asyncio.gather(head, *tasks, return_exceptions=True)
    assert served == [1, 3]
    async with turns.turn(lambda: 0), asyncio.timeout(5):
        pass
