"""Clients of a gateway in one process: so many concurrent streams, each request after the other, every token checked.

    python -m scripts.bench.clients --address HOST:PORT --streams 1024 --seconds 20 --tokens 128

Prints one JSON line a second with what has arrived so far, and a last one with what went wrong.  Over `--channels`
connections, as many clients would; with tokens per message, which tells how much the gateway gathered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import grpc
import uvloop

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.tokens import Speech

PROMPT_WORDS = 24
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


class OfferedLoad:
    """What has been asked for and what has come."""

    def __init__(self, speech: Speech, num_tokens: int, until: float) -> None:
        self._speech = speech
        self._num_tokens = num_tokens
        self._until = until
        self._num_asked = 0
        self.tokens = self.messages = self.finished = 0
        self.wrong: list[str] = []

    async def stream(self, stub: Any) -> None:
        """One client: requests until the time is up, the last one to its end."""
        while time.monotonic() < self._until and len(self.wrong) < 10:
            self._num_asked += 1
            try:
                await self._generate(stub, self._num_asked)
            except grpc.RpcError as error:
                self.wrong.append(str(error))

    async def _generate(self, stub: Any, seed: int) -> None:
        heard: list[int] = []
        text = []
        async for response in stub.Generate(ask(seed, self._num_tokens)):
            self.messages += 1
            self.tokens += len(response.token_ids)
            heard += response.token_ids
            text.append(response.text)
        self.finished += 1
        expected = self._speech.tokens(seed, self._num_tokens)
        if heard != expected:
            self.wrong.append(f"request {seed}: {len(heard)} tokens of {len(expected)}, or others")
        if seed % 16 == 0 and "".join(text) != self._speech.tokenizer.decode(expected, skip_special_tokens=True):
            self.wrong.append(f"request {seed}: its text is not that of its tokens")

    def line(self) -> str:
        fields = {"tokens": self.tokens, "messages": self.messages, "finished": self.finished, "wrong": self.wrong}
        return json.dumps({"time": time.monotonic(), **fields})


def ask(seed: int, num_tokens: int) -> Any:
    """Words that no other request begins with, so that the prefix cache has none of it."""
    words = " ".join(f"{(seed * 7 + n) % 9973}" for n in range(PROMPT_WORDS))
    request = inference_pb2.GenerateRequest(text=words, stream=inference_pb2.StreamOptions(return_token_ids=True))
    request.sampling.seed, request.sampling.max_tokens = seed, num_tokens
    request.sampling.temperature, request.sampling.ignore_eos = 0.0, True
    return request


async def report(load: OfferedLoad) -> None:
    while True:
        print(load.line(), flush=True)
        await asyncio.sleep(1)


async def run(address: str, streams: int, seconds: float, num_tokens: int, num_channels: int) -> OfferedLoad:
    load = OfferedLoad(Speech(), num_tokens, time.monotonic() + seconds)
    channels: list[Any] = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(num_channels)]
    stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
    reporting = asyncio.create_task(report(load))
    await asyncio.gather(*(load.stream(stubs[index % num_channels]) for index in range(streams)))
    reporting.cancel()
    for channel in channels:
        await channel.close()
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--channels", type=int, default=16)
    args = parser.parse_args()
    load = uvloop.run(run(args.address, args.streams, args.seconds, args.tokens, args.channels))
    print(load.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
