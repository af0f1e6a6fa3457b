"""Services of a real troupe die, freeze and are replaced while streams go on: none fails, repeats or skips a token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.chaos.cases import PLAIN
from scripts.bench.chaos.main import ChaosOrder, perform, table
from tests.system.harness import ROOT, Answer, Troupe, ask, collect, streaming, troupe

FIELDS = ("text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens")
NOTICED_SECONDS = 3.0
OPTIONS = (
    "--num-threads", "1", "--num-blocks", "512", "--workers", "2", "--tokenizers", "2", "--detokenizers", "2",
    "--drain-timeout", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("loss"), *OPTIONS) as started:
        yield started


def requests(num_tokens: int = 250) -> list[Any]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"n": 2}, {"repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
    ]  # fmt: skip
    held = ask("One day", seed=9, max_tokens=num_tokens, ignore_eos=True, temperature=0.8)
    held.sampling.grammar.regex = r"([a-z]{2,8} )+[a-z]{2,8}\."
    asked = [
        ask("One day", seed=index, max_tokens=num_tokens, ignore_eos=True, **kind) for index, kind in enumerate(kinds)
    ]
    return [*asked, held]


def same(answers: list[Any], wanted: list[list[Answer]]) -> None:
    for answer, other in zip(answers, wanted, strict=True):
        assert not isinstance(answer, BaseException), answer
        for mine, theirs in zip(answer, other, strict=True):
            assert [getattr(mine, field) for field in FIELDS] == [getattr(theirs, field) for field in FIELDS]


def seconds_until(running: Troupe, event: str, since: float, member: str) -> float:
    """From a moment (Unix seconds) until the scheduler wrote that event of a member of this service."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in running.logs():
            if line["event"] == event and line["member"].startswith(member) and stamp(line) > since:
                return stamp(line) - since
        time.sleep(0.05)
    raise AssertionError(f"no {event} of a {member}")


def stamp(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def test_a_killed_worker_is_noticed_at_once_and_its_streams_go_on(running: Troupe) -> None:
    asked = requests()
    wanted = running.generate(asked)
    # Of two that die in the same moment a request may be taken for the cause that was moved from one to the other.
    answers = asyncio.run(running.disturb(asked, "worker", at_most=1))
    same(answers, wanted)
    assert seconds_until(running, "lost", running.harmed_at, "worker") < NOTICED_SECONDS


def test_a_frozen_worker_is_given_up_and_what_it_says_later_is_not_heard(running: Troupe) -> None:
    asked = requests(400)
    wanted = running.generate(asked)

    async def freeze() -> list[Any]:
        async with running.channel() as channel:
            tasks = await streaming(channel, asked)
            victim = running.pids("worker")[0]
            frozen_at = time.time()
            os.kill(victim, signal.SIGSTOP)
            seconds = await asyncio.to_thread(seconds_until, running, "lost", frozen_at, "worker")
            os.kill(victim, signal.SIGCONT)
            assert seconds < 2 * NOTICED_SECONDS, "the last heartbeat may have come just before"
            return await asyncio.gather(*tasks, return_exceptions=True)

    same(asyncio.run(freeze()), wanted)


def test_a_frozen_scheduler_takes_nobody_for_lost(running: Troupe) -> None:
    asked = requests()
    wanted = running.generate(asked)
    before = len([line for line in running.logs() if line["event"] == "lost"])

    async def freeze() -> list[Any]:
        async with running.channel() as channel:
            tasks = [asyncio.create_task(collect(channel, request)) for request in asked]
            await asyncio.sleep(0.5)
            running.kill("scheduler", signal.SIGSTOP)
            await asyncio.sleep(4.0)
            running.kill("scheduler", signal.SIGCONT)
            return await asyncio.gather(*tasks, return_exceptions=True)

    same(asyncio.run(freeze()), wanted)
    assert len([line for line in running.logs() if line["event"] == "lost"]) == before


def test_a_lost_gateway_s_requests_are_ended(running: Troupe) -> None:
    before = running.settled_load()

    async def orphan() -> list[Any]:
        async with running.channel() as channel:
            begun = [asyncio.Event() for _ in range(4)]
            tasks = [
                asyncio.create_task(collect(channel, ask("One day", max_tokens=900, ignore_eos=True), begun=event))
                for event in begun
            ]
            for event in begun:
                await event.wait()
            running.kill("gateway")
            return await asyncio.gather(*tasks, return_exceptions=True)

    killed_at = time.time()
    assert all(isinstance(outcome, Exception) for outcome in asyncio.run(orphan()))
    assert seconds_until(running, "lost", killed_at, "gateway") < NOTICED_SECONDS
    running.until_serving()
    load = running.settled_load()
    assert load.num_aborted == before.num_aborted + 4
    assert all(w.num_free_blocks + w.num_cached_blocks == w.num_blocks for w in load.workers)


def test_a_rolling_restart_fails_no_request(running: Troupe) -> None:
    long = ask("One day", temperature=0.0, max_tokens=900, ignore_eos=True)  # longer than the drain timeout
    asked = [*requests(60)[::2], long]
    wanted = running.generate(asked)

    async def load(over: asyncio.Event) -> int:
        """Clients that ask again and again, each over a connection of its own."""

        async def repeat(request: Any, other: list[Answer]) -> int:
            count = 0
            async with running.channel() as channel:
                while not over.is_set():
                    same([await collect(channel, request)], [other])
                    count += 1
            return count

        return sum(await asyncio.gather(*(repeat(*pair) for pair in zip(asked, wanted, strict=True))))

    async def both() -> tuple[int, str]:
        over = asyncio.Event()
        clients = asyncio.create_task(load(over))
        await asyncio.sleep(0.5)
        said = await asyncio.to_thread(pageant_restart, running)
        over.set()
        return await clients, said

    before = {
        service: running.pids(service) for service in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
    }
    count, said = asyncio.run(both())
    assert said.count("was replaced") == 8 and said.endswith("done\n"), said
    assert count > 10
    for service, pids in before.items():
        after = running.pids(service)
        assert len(after) == len(pids) and not set(after) & set(pids), service


def pageant_restart(running: Troupe) -> str:
    command = [sys.executable, "-m", "services.cli", "restart", "--runtime-dir", str(running.log_dir.parent / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_short_chaos_changes_nothing(tmp_path: Path) -> None:
    result = asyncio.run(perform(tmp_path, ChaosOrder(8, 3, per_kind=1, max_tokens=120)))
    print(table(result))
    assert not result.wrong, result.wrong[:5]
    assert not result.leftovers
    assert all(result.num_streams[kind] for kind in (*PLAIN, "stop strings", "bytes", "grammar", "adapters"))
    assert len(result.inflicted) == 8 and sum(result.num_streams.values()) > result.num_clients
