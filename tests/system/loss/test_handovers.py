"""Streams go over from a worker that is asked to leave, and from a worker for prompts to others; where one of these is
killed, no token differs."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

from tests.system.harness import Answer, Troupe, ask, troupe

OPTIONS = ("--num-blocks", "512", "--num-threads", "1", "--draft", "off")
BLOCK_SIZE = 16
NUM_PROMPT = 480


def asks(seed: int, max_tokens: int) -> list[Any]:
    chance = random.Random(seed)
    prompts = [chance.choices(range(4, 4000), k=NUM_PROMPT) for _ in range(4)]
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    return [ask(token_ids=prompt, **options) for prompt in prompts]


def tokens(answers: list[list[Answer]]) -> list[list[int]]:
    return [one.token_ids for some in answers for one in some]


def handed_over(running: Troupe) -> list[tuple[int, int]]:
    """Of each sequence that went over: its tokens then, and those that were cached where it went on."""
    events = [e for e in running.logs() if e["event"] in ("sequence_handed_over", "sequence_scheduled")]
    events.sort(key=lambda event: event["at"])
    found, under_way = [], {}
    for event in events:
        if event["event"] == "sequence_handed_over":
            under_way[event["request_id"]] = event["num_tokens"]
        elif event["request_id"] in under_way:
            found.append((under_way.pop(event["request_id"]), event["num_cached_tokens"]))
    return found


def test_streams_go_over_when_their_worker_is_to_leave(tmp_path: Path) -> None:
    with troupe(tmp_path, *OPTIONS, "--workers", "2") as running:
        requests = asks(1, 200)
        disturbed = asyncio.run(running.disturb(requests, "worker", signal.SIGUSR1, at_most=1))
        running.until_serving()
        assert tokens(disturbed) == tokens(running.generate(requests))
        gone = handed_over(running)
        assert gone, "no stream went over"
        assert all(length - cached <= BLOCK_SIZE + 16 for length, cached in gone), f"computed again: {gone}"


def test_prompts_are_computed_apart_and_a_death_costs_nothing(tmp_path: Path) -> None:
    with troupe(tmp_path, *OPTIONS, "--prefill", "1", "--decode", "2") as running:
        plain = running.generate(asks(1, 20))
        gone = handed_over(running)
        assert len(gone) == len(plain), "each prompt is computed apart"
        assert all(length - cached <= BLOCK_SIZE for length, cached in gone), f"computed again: {gone}"
        requests = asks(2, 60)
        disturbed = asyncio.run(running.disturb(requests, "worker", at_most=2))  # that for prompts, and another
        assert tokens(disturbed) == tokens(running.generate(requests))
