"""The profile `store`: what a worker that is killed had computed is fetched by the next one, not computed again."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator

import grpc
import pytest

from scripts.bench.common.stack import ROOT, Stack
from tests.compose.stack import crash, health, name_of, running_stack, until
from tests.system.harness import Answer, ask, collect

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

PROMPT = random.Random(3).choices(range(4, 4000), k=500)
STORED_SECONDS = 1.0  # for the last blocks to be stored


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("store")
    with running_stack(directory, profile="store", num_blocks=256, num_threads=1) as started:
        yield started


def answered(stack: Stack) -> Answer:
    request = ask(token_ids=PROMPT, max_tokens=16, temperature=0.8, seed=4, ignore_eos=True)

    async def call() -> Answer:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            (answer,) = await collect(channel, request, timeout=60)
            return answer

    return asyncio.run(call())


def replaced(stack: Stack, service: str) -> None:
    """Kill its one container's processes, and wait until Docker has started them again."""
    name = name_of(stack, service)
    restarts = int(stack.inspect(name, "{{.RestartCount}}"))
    crash(stack, name)
    until(lambda: int(stack.inspect(name, "{{.RestartCount}}")) > restarts)
    until(lambda: health(stack, name) == "healthy")
    until(lambda: health(stack, name_of(stack, "gateway")) == "healthy")


def test_what_a_killed_worker_had_computed_is_fetched(stack: Stack) -> None:
    first = answered(stack)
    assert first.cached_tokens == 0
    time.sleep(STORED_SECONDS)
    replaced(stack, "worker")
    second = answered(stack)
    assert second.token_ids == first.token_ids
    assert second.cached_tokens >= 0.9 * len(PROMPT), "fetched, not computed"


def test_a_rolling_restart_replaces_stores_too(stack: Stack) -> None:
    stack.up(store=2)
    expected = answered(stack).token_ids
    before = {one["ID"] for one in stack.containers("store")}
    for arguments, are_replaced in ((["detokenizer"], False), (["store"], True)):
        roll = [str(ROOT / "scripts" / "roll"), *arguments]
        done = subprocess.run(roll, env=stack.environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        after = {one["ID"] for one in stack.containers("store")}
        assert len(after) == 2 and (not after & before if are_replaced else after == before), arguments
    assert answered(stack).token_ids == expected
    stack.up(store=1)


def test_two_stores_and_the_death_of_one(stack: Stack) -> None:
    expected = answered(stack).token_ids
    stack.up(store=2)
    assert [health(stack, one["Name"]) for one in stack.containers("store")] == ["healthy"] * 2
    replaced(stack, "store")  # the first, which had the blocks: it is empty now
    assert answered(stack).token_ids == expected
    time.sleep(STORED_SECONDS)  # the worker has them still, and gives them to a store again
    replaced(stack, "worker")
    again = answered(stack)
    assert again.token_ids == expected
    assert again.cached_tokens >= 0.9 * len(PROMPT), "fetched from a store that came later"
