"""The profile `tp`: a worker of two containers, each with a rank of it, says what a worker of one process says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from scripts.bench.common.stack import Stack
from tests.compose.stack import crash, health, name_of, running_stack, until
from tests.system.harness import Answer, ask, collect, streaming

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

REQUESTS = [ask("One day", max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("ranks"), profile="tp", draft="off", num_blocks=256) as started:
        yield started


def texts(answers: list[list[Answer]]) -> list[tuple[str, list[int]]]:
    return [(one.text, one.token_ids) for each in answers for one in each]


async def answered(stack: Stack) -> list[list[Answer]]:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        return await asyncio.gather(*(collect(channel, request, timeout=60) for request in REQUESTS))


def test_a_container_of_the_profile_tp_dies_under_streams(stack: Stack) -> None:
    stack.up(leader=0, rank=0)
    wanted = texts(asyncio.run(answered(stack)))
    stack.up(worker=0)
    assert not stack.containers("worker") and health(stack, name_of(stack, "rank")) == "healthy"
    assert texts(asyncio.run(answered(stack))) == wanted
    follower = name_of(stack, "rank")
    restarts = int(stack.inspect(follower, "{{.RestartCount}}"))

    async def killed() -> list[Any]:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            tasks = await streaming(channel, REQUESTS)
            await asyncio.to_thread(crash, stack, follower)
            return await asyncio.gather(*tasks)

    assert texts(asyncio.run(killed())) == wanted, "streams go on when the group is back"
    until(lambda: int(stack.inspect(follower, "{{.RestartCount}}")) > restarts)
    assert any(line["event"] == "rank_ended" for line in stack.logs("leader"))
