"""What passes between workers: requests that go over from a worker that leaves, prompts that one worker computes for
another, and a prefix that one has and another fetches.  `scripts/bench_moves` runs it.

Everything is compared with one undisturbed worker, token by token and to the last bit of each log-probability, for
every type of arithmetic: greedy and sampled requests, two samples of one prompt, a grammar; int8 with prompt lookup.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.common.clients import ClientConnections, ask_of
from scripts.bench.common.deployment import ServedDeployment, log_lines
from scripts.bench.common.report import Result
from services.cli.supervision.orders import send_order
from shared.metrics import percentile
from shared.processes.supervision import SupervisorOrder, desk_path

TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "draft": "off"},
    "bfloat16": {"dtype": "bfloat16", "draft": "off"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8", "draft": "ngram"},
}
BLOCK_SIZE, NUM_PROMPT, NUM_TOKENS, NUM_STREAMS = 16, 480, 320, 8
MOST_GAP, MOST_AGAIN = 3.0, BLOCK_SIZE + 16  # steps; tokens
OTHERS = 1.10  # of the 99th percentile between tokens
PAUSE_SECONDS = 1.0  # around the time at which a stream goes over, and before the order to leave
IDLE_SECONDS = 3.0  # after the start: workers read in the first idle second what grammars need
BEGUN = 16  # tokens of each stream before that
SETTINGS: dict[str, Any] = {"num_threads": 1, "num_blocks": 1024, "log_level": "info"}
Call = Callable[[ServedDeployment], None]


@dataclass
class StreamRecord:
    """What a client got of one sequence."""

    request_id: str = ""
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each message


def asks(shared: int, seed: int) -> list[Any]:
    """Prompts whose first tokens, so many, are the same."""
    chance = random.Random(seed)
    prefix = chance.choices(range(4, 4000), k=shared)
    found = []
    for index in range(NUM_STREAMS):
        sampling = {
            "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": index, "temperature": 0.8 if index % 2 else 0.0,
            "logprobs": 2, "n": 2 if index == 3 else 1, "grammar": {"regex": "([a-z]+ )+"} if index == 5 else None,
        }  # fmt: skip
        ids = [*prefix, *chance.choices(range(4, 4000), k=NUM_PROMPT - shared)]
        found.append(ask_of(ids, **sampling))
    return found


async def collect(stub: Any, request: Any, records: list[StreamRecord], note: Callable[[], None]) -> None:
    async for message in stub.Generate(request, timeout=120):
        record = records[message.index]
        record.request_id, record.index = message.request_id, message.index
        record.times.append(time.perf_counter())
        record.token_ids += message.token_ids
        note()
        record.logprobs += [one.SerializeToString(deterministic=True) for one in message.logprobs]


async def generate(deployment: ServedDeployment, requests: list[Any], meanwhile: Call | None) -> list[StreamRecord]:
    """`meanwhile` is called once all stream."""
    records = [[StreamRecord() for _ in range(max(1, request.sampling.n))] for request in requests]
    flat, begun = [record for some in records for record in some], asyncio.Event()

    def note() -> None:
        if not begun.is_set() and min(len(record.token_ids) for record in flat) >= BEGUN:
            begun.set()

    async with ClientConnections(deployment.address) as made:
        pairs = zip(requests, records, strict=True)
        tasks = [asyncio.create_task(collect(made.stubs[0], request, some, note)) for request, some in pairs]
        if meanwhile is not None:
            await begun.wait()
            await asyncio.to_thread(meanwhile, deployment)
        await asyncio.gather(*tasks)
    return flat


def run(
    settings: dict[str, Any], requests: list[Any], options: list[str], meanwhile: Call | None = None, idle: float = 0.0
) -> tuple[list[StreamRecord], list[dict[str, Any]]]:
    """What clients got, and the scheduler's lines."""
    with ServedDeployment(SETTINGS | settings, *options) as deployment:
        time.sleep(idle)
        records = asyncio.run(generate(deployment, requests, meanwhile))
        time.sleep(0.5)  # for the last lines
        return records, list(log_lines(deployment.log_dir / "scheduler-0.log"))


def num_differing(records: list[StreamRecord], wanted: list[StreamRecord]) -> tuple[int, int]:
    """Tokens, and log-probabilities in some bit."""
    pairs = list(zip(records, wanted, strict=True))
    tokens = sum(a != b for one, two in pairs for a, b in zip(one.token_ids, two.token_ids, strict=True))
    return tokens, sum(a != b for one, two in pairs for a, b in zip(one.logprobs, two.logprobs, strict=True))


def computed_again(lines: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Tokens of each sequence that went over which were not found where it went on."""
    under_way: dict[tuple[str, int], int] = {}
    found: dict[tuple[str, int], int] = {}
    for line in sorted((one for one in lines if "at" in one), key=lambda one: one["at"]):
        key = line.get("request_id", ""), line.get("index", 0)
        if line["event"] == "sequence_handed_over":
            under_way[key] = line["num_tokens"]
        elif line["event"] == "sequence_scheduled" and key in under_way:
            found[key] = under_way.pop(key) - line["num_cached_tokens"]
    return found


def handed_over(lines: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """When each sequence went over, by the wall clock."""
    return {
        (line["request_id"], line["index"]): line["at"] for line in lines if line["event"] == "sequence_handed_over"
    }


def gaps(record: StreamRecord, begin: float, end: float) -> list[float]:
    inside = [when for when in record.times if begin <= when <= end]
    return [later - sooner for sooner, later in pairwise(inside)]


def dismiss(deployment: ServedDeployment) -> None:
    send_order(desk_path(deployment.runtime_dir), SupervisorOrder(scale={"worker": 1}), lambda line: None)


def measure(name: str, settings: dict[str, Any]) -> list[Result]:
    """One type: undisturbed, then each use."""
    results: list[Result] = []

    def compare(what: str, records: list[StreamRecord], wanted: list[StreamRecord]) -> None:
        tokens, bits = num_differing(records, wanted)
        results.append(Result(f"{name}, {what}: tokens that differ", tokens, at_most=0))
        results.append(Result(f"{name}, {what}: log-probabilities that differ", bits, at_most=0))

    apart, together = asks(0, 1), asks(NUM_PROMPT - 16, 2)
    wanted, _ = run(settings, apart, [])
    records, lines = run(settings, apart, ["--workers", "2"], dismiss)
    compare("a worker leaves", records, wanted)
    again = computed_again(lines)
    most = max(again.values(), default=0)
    results.append(Result(f"{name}, a worker leaves: sequences that went over", len(again), at_least=1))
    results.append(Result(f"{name}, a worker leaves: computed again of one", most, "tokens", at_most=MOST_AGAIN))
    records, lines = run(settings, apart, ["--prefill", "1", "--decode", "1"])
    compare("prompts apart", records, wanted)
    most = max(computed_again(lines).values(), default=0)
    results.append(Result(f"{name}, prompts apart: computed again of one", most, "tokens", at_most=BLOCK_SIZE))
    wanted, _ = run(settings, together, [])
    records, lines = run(settings, together, ["--workers", "2"])
    compare("a prefix of another worker", records, wanted)
    return results


def measure_pauses(model: Path, rounds: int) -> list[Result]:
    """How long streams of a larger model pause when their worker leaves, in steps as they had them before.

    A step of the bundled model is shorter than what passes between services in one.
    """
    steps: list[float] = []  # all in seconds
    moved: list[float] = []  # gaps around the time at which a stream goes over
    others: list[float] = []  # of the other streams, until all have gone over
    drains: list[float] = []  # until the last stream has gone over
    for seed in range(rounds):
        ordered: list[float] = []

        def dismiss_now(deployment: ServedDeployment, ordered: list[float] = ordered) -> None:
            ordered.append(time.perf_counter())
            dismiss(deployment)

        settings = TYPES["bfloat16"] | {"model": str(model)}
        records, lines = run(settings, asks(0, 10 + seed), ["--workers", "2"], dismiss_now, idle=IDLE_SECONDS)
        behind = time.time() - time.perf_counter()  # of a moment by the wall clock, from the same by the other
        went = {key: at - behind for key, at in handed_over(lines).items()}
        (begin,) = ordered
        last = max(went.values(), default=begin)
        drains.append(last - begin)
        all_stream = max(record.times[1] for record in records)  # before, some wait for others' prompts
        steps += [gap for record in records for gap in gaps(record, max(all_stream, begin - PAUSE_SECONDS), begin)]
        for record in records:
            if (at := went.get((record.request_id, record.index))) is not None:
                moved += gaps(record, at - PAUSE_SECONDS / 2, at + PAUSE_SECONDS / 2)
            else:
                others += gaps(record, begin, last + PAUSE_SECONDS / 2)
    step = median(steps)
    before = percentile(sorted(steps), 99) / step
    ratios = [sorted(gap / step for gap in one) for one in (moved, others)]
    what = f"model S, {rounds} workers leave"
    return [
        Result(f"{what}: gaps of streams that went over, p99", percentile(ratios[0], 99), "steps", at_most=MOST_GAP),
        Result(f"{what}: the longest of these", max(ratios[0], default=math.nan), "steps"),
        Result(f"{what}: gaps of the others, p99", percentile(ratios[1], 99), "steps"),
        Result(f"{what}: of the p99 of all before", percentile(ratios[1], 99) / before, "x", at_most=OTHERS),
        Result(f"{what}: the longest of these", max(ratios[1], default=math.nan), "steps"),
        Result(f"{what}: a step, before", 1000 * step, "ms"),
        Result(f"{what}: from the order until the last stream has gone over, at most", max(drains), "s"),
    ]
