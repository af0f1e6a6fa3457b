"""Sends hostile grammars, one after the other: a process of its own, so that what it does is not its victims' time.

    python -m scripts.bench.structured.attacker --address HOST:PORT [--salts 60]

Its input says what to send (hostile or harmless formats, or plain requests), for how many seconds, and how many seconds
lie between two of them at least (`scripts/bench/common/disturbance.py`, `obey`).

Where there are two processors it takes its victims' time all the same, which an attacker on another machine would not:
so messages are encoded before anything is measured (a megabyte takes this process longer than it takes the gateway),
and sent as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.disturbance import AttackOutcome, obey
from scripts.bench.structured.hostile import hostile
from shared.client.client import sampling_proto

FEW_TOKENS = 8  # of a hostile request that is served after all
TIMEOUT = 20.0  # seconds
SERVED = "served"
GENERATE = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
OTHER_TENANT = (("x-tenant", "harmless"),)  # a tenant without debt

Message = tuple[str, bytes]  # what it is, and a GenerateRequest


def message(grammar: dict[str, Any] | None) -> bytes:
    sampling = sampling_proto({"grammar": grammar, "max_tokens": FEW_TOKENS})
    return bytes(inference_pb2.GenerateRequest(text="Once", sampling=sampling).SerializeToString())


class RequestSender:
    """Calls with messages that are encoded already."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._call: Any = channel.unary_stream(GENERATE, None, None)
        self._metadata = metadata

    async def send(self, messages: Iterator[Message], seconds: float, pace: float) -> AttackOutcome:
        """`pace`: seconds from one request to the next, at least."""
        slowest: dict[str, float] = {}
        endings: Counter[str] = Counter()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name, encoded = next(messages)
            begin = time.perf_counter()
            endings[await self._ending(encoded)] += 1
            took = time.perf_counter() - begin
            slowest[name] = max(slowest.get(name, 0.0), took)
            await asyncio.sleep(max(0.0, pace - took))
        return AttackOutcome(slowest, endings)

    async def _ending(self, encoded: bytes) -> str:
        try:
            async for _ in self._call(encoded, timeout=TIMEOUT, metadata=self._metadata):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return SERVED


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--salts", type=int, default=60, help="sets of grammars made before the first attack")
    args = parser.parse_args()
    made = [(name, message(grammar)) for salt in range(args.salts) for name, grammar in hostile(salt).items()]
    harmless = (("harmless", message({"regex": f"[a-z ,.]+{number}"})) for number in itertools.count())
    plain = itertools.repeat(("plain", message(None)))
    async with grpc.aio.insecure_channel(args.address) as channel:
        attacker, other = RequestSender(channel), RequestSender(channel, OTHER_TENANT)
        await obey(
            {
                "hostile": partial(attacker.send, itertools.cycle(made)),
                "harmless": partial(other.send, harmless),
                "plain": partial(other.send, plain),
            }
        )


if __name__ == "__main__":
    asyncio.run(main())
