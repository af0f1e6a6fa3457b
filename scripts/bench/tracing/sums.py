"""Whether phases add up: of thousands of requests that disturb each other, what each line says beside its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import uvloop

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.tracing.asking import END, ask, lines
from scripts.bench.troupe import troupe

STEP_MS = 4.0
NUM_STREAMS = 32
LENGTHS = (1, 4, 8, 24)  # tokens to generate
PROMPTS = (4, 24, 96, 300)


def gaps(num_requests: int) -> list[tuple[float, float]]:
    """Of each request, milliseconds from end to end and what its phases add up to."""
    with troupe(STEP_MS, max_num_seqs=24, max_num_batched_tokens=512) as running:
        uvloop.run(_ask_all(running.address, num_requests))
        ended = [line for line in lines(running.log_of("gateway")) if line["event"] == END]
    return [(line["e2e_ms"], sum(line["phases"].values())) for line in ended]


async def _ask_all(address: str, num_requests: int) -> None:
    numbers = iter(range(num_requests))
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(_ask_some(stub, numbers) for _ in range(NUM_STREAMS)))


async def _ask_some(stub: Any, numbers: Any) -> None:
    for number in numbers:
        size: Any = {"num_prompt": PROMPTS[number % 4], "num_tokens": LENGTHS[number // 4 % 4]}
        async for _ in stub.Generate(ask(number, **size)):
            pass


def share_within(pairs: Sequence[tuple[float, float]], *, relative: float = 0.01, absolute: float = 2.0) -> float:
    """Percent of them whose two figures differ by no more than one of the two bounds, in milliseconds."""
    good = sum(abs(whole - parts) <= max(relative * whole, absolute) for whole, parts in pairs)
    return 100 * good / max(1, len(pairs))


def spread(pairs: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """How far they are apart, in milliseconds."""
    distances = sorted(abs(whole - parts) for whole, parts in pairs)
    return {"median": distances[len(distances) // 2], "worst": distances[-1]}
