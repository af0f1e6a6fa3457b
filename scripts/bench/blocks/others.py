"""What becomes of the streams of a worker while blocks come to it from a store.  `scripts/bench_moves` runs it.

Prompts are computed and stored; then the worker is killed, and its successor decodes streams of its own.  Beside these
each prompt is asked for twice: first its blocks come from the store, then they are in the worker's pool.  Both times
the same few tokens are computed, so what differs between the two is the move alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from scripts.bench.blocks.handovers import StreamRecord, gaps
from scripts.bench.common.clients import ClientConnections, ask_of
from scripts.bench.common.deployment import ServedDeployment
from scripts.bench.common.report import Result
from shared.metrics import percentile

NUM_STREAMS, NUM_PROMPTS, NUM_PROMPT = 8, 16, 512
WINDOW_SECONDS = 0.5  # from a prompt's arrival on
STORED_SECONDS = 2.0  # that the last blocks have to be stored
FILLS = 16  # prompts that write to the whole pool before anything is measured: the kernel gives memory page by page
BLOCK_SIZE = 16
NUM_BLOCKS = (NUM_PROMPTS + FILLS) * NUM_PROMPT // BLOCK_SIZE
MOST = 1.10  # of the 99th percentile between tokens
VOCAB = 8000  # that the made tokenizer has


class TimedStreams:
    """TimedStreams of one worker, and when each of their tokens came."""

    def __init__(self) -> None:
        self.records = [StreamRecord() for _ in range(NUM_STREAMS)]
        self.under_way = asyncio.Event()  # all have some tokens

    async def run(self, stub: Any, place: int) -> None:
        """Until it is cancelled."""
        ids = [4 + (97 * place + index) % 1000 for index in range(BLOCK_SIZE)]
        while True:
            async for _ in stub.Generate(ask_of(ids, max_tokens=1500, temperature=0.0, ignore_eos=True)):
                self.records[place].times.append(time.perf_counter())
                if min(len(record.times) for record in self.records) >= BLOCK_SIZE:
                    self.under_way.set()

    def gaps(self, begin: float) -> list[float]:
        """Between tokens in the window that begins then."""
        return [gap for record in self.records for gap in gaps(record, begin, begin + WINDOW_SECONDS)]


async def first_token(stub: Any, ids: list[int]) -> int:
    """How many tokens of the prompt were cached."""
    call = stub.Generate(ask_of(ids, max_tokens=1, temperature=0.0, ignore_eos=True))
    cached: list[int] = [message.usage.cached_tokens async for message in call]
    return cached[-1]


async def beside(address: str, prompts: list[list[int]]) -> dict[str, list[float]]:
    """Gaps of the streams while prompts come whose blocks are stored, pooled, and while none comes."""
    found: dict[str, list[float]] = {"stored": [], "pooled": [], "none": []}
    streams, least = TimedStreams(), NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE
    async with ClientConnections(address) as made:
        tasks = [asyncio.create_task(streams.run(made.stubs[0], place)) for place in range(NUM_STREAMS)]
        await streams.under_way.wait()
        for prompt in prompts:
            for kind in ("stored", "pooled"):
                begin = time.perf_counter()
                cached = await first_token(made.stubs[0], prompt)
                if cached < least:
                    raise RuntimeError(f"{cached} tokens of a stored prompt were cached, not {least}")
                await asyncio.sleep(max(0.0, begin + WINDOW_SECONDS - time.perf_counter()))
                found[kind] += streams.gaps(begin)
            begin = time.perf_counter()
            await asyncio.sleep(WINDOW_SECONDS)
            found["none"] += streams.gaps(begin)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def compute(address: str, prompts: list[list[int]]) -> None:
    async with ClientConnections(address) as made:
        await made.channels[0].channel_ready()
        for prompt in prompts:
            await first_token(made.stubs[0], prompt)


def measure(model: Path, dtype: str, seed: int) -> list[Result]:
    chance = random.Random(seed)
    prompts, fills = (
        [chance.choices(range(4, VOCAB), k=NUM_PROMPT + 1) for _ in range(count)] for count in (NUM_PROMPTS, 2 * FILLS)
    )
    settings: dict[str, Any] = {
        "model": str(model), "dtype": dtype, "draft": "off", "store_memory": 4 << 30, "verify_fetches": 0,
        "max_model_len": 2048, "num_blocks": NUM_BLOCKS,
    }  # fmt: skip
    with ServedDeployment(settings) as deployment:
        asyncio.run(compute(deployment.address, prompts))
        time.sleep(STORED_SECONDS)
        (worker,) = deployment.pids("worker")
        os.kill(worker, signal.SIGKILL)
        asyncio.run(compute(deployment.address, fills))
        found = asyncio.run(beside(deployment.address, prompts))
    stored, pooled, none = (1000 * percentile(found[kind], 99) for kind in ("stored", "pooled", "none"))
    what = f"others' p99 between tokens, beside prompts of {NUM_PROMPT}"
    return [
        Result("others' p99 between tokens, beside no prompt", none, "ms"),
        Result(f"{what} in the pool", pooled, "ms"),
        Result(f"{what} that come from the store, of that", stored / pooled, "x", at_most=MOST),
    ]
