"""Clients of a gateway in one process: so many concurrent streams, each request after the other, every token checked.

    python -m scripts.bench.common.clients --address HOST:PORT --streams 1024 --seconds 20 --tokens 128

Prints one JSON line a second with what has arrived so far, and a last one with what went wrong.  Over `--channels`
connections, as many clients would; with tokens per message, which tells how much the gateway gathered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

import grpc
import msgspec
import uvloop

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.common.tokens import Speech
from shared.client.client import sampling_proto

PROMPT_WORDS = 24
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
PATIENCE = 60.0  # seconds for the last requests to end


class ClientConnections:
    """Several to one gateway, as different clients have them; made and closed in a running event loop."""

    def __init__(self, address: str, count: int = 1) -> None:
        self.channels: list[Any] = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(count)]
        self.stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self.channels]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self.channels:
            await channel.close()


class Received(msgspec.Struct):
    """What clients have received at one moment (time.monotonic), and what was wrong with it."""

    time: float
    tokens: int
    messages: int
    finished: int
    wrong: list[str]
    pid: int  # of the clients' process


class Timed(Protocol):
    @property
    def time(self) -> float: ...


T = TypeVar("T", bound=Timed)


def offered(address: str, *, streams: int, seconds: float, tokens: int, channels: int = 16) -> Iterator[Received]:
    """Clients in a process of their own, and what they have received, once a second until they have ended."""
    command = [sys.executable, "-m", __name__, "--address", address]
    for name, value in (("streams", streams), ("seconds", seconds), ("tokens", tokens), ("channels", channels)):
        command += [f"--{name}", str(value)]
    deadline = time.monotonic() + seconds + PATIENCE
    with subprocess.Popen(command, stdout=subprocess.PIPE) as clients:
        assert clients.stdout is not None
        try:
            for line in clients.stdout:
                yield (received := msgspec.json.decode(line, type=Received))
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the streams do not end: {received}")
        finally:
            clients.kill()


def full_load(samples: Sequence[T], warm: float, seconds: float) -> list[T]:
    """Without the first seconds, those after the load, and the last sample, which is of a process about to end."""
    return [sample for sample in samples[:-1] if warm <= sample.time - samples[0].time <= seconds]


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
        token_ids: list[int] = []
        text = []
        async for response in stub.Generate(ask(seed, self._num_tokens)):
            self.messages += 1
            self.tokens += len(response.token_ids)
            token_ids += response.token_ids
            text.append(response.text)
        self.finished += 1
        expected = self._speech.tokens(seed, self._num_tokens)
        if token_ids != expected:
            self.wrong.append(f"request {seed}: {len(token_ids)} tokens of {len(expected)}, or others")
        if seed % 16 == 0 and "".join(text) != self._speech.tokenizer.decode(expected, skip_special_tokens=True):
            self.wrong.append(f"request {seed}: its text is not that of its tokens")

    def line(self) -> str:
        now = Received(time.monotonic(), self.tokens, self.messages, self.finished, self.wrong, os.getpid())
        return msgspec.json.encode(now).decode()


def ask(seed: int, num_tokens: int) -> Any:
    """Words that no other request begins with, so that the prefix cache has none of it."""
    words = " ".join(f"{(seed * 7 + n) % 9973}" for n in range(PROMPT_WORDS))
    request = inference_pb2.GenerateRequest(text=words, stream=inference_pb2.StreamOptions(return_token_ids=True))
    request.sampling.seed, request.sampling.max_tokens = seed, num_tokens
    request.sampling.temperature, request.sampling.ignore_eos = 0.0, True
    return request


def ask_of(token_ids: Iterable[int], **sampling: Any) -> Any:
    """A request with these tokens as its prompt, whose answer tells its tokens."""
    chosen, stream = sampling_proto(sampling), inference_pb2.StreamOptions(return_token_ids=True)
    return inference_pb2.GenerateRequest(token_ids={"ids": token_ids}, stream=stream, sampling=chosen)


async def report(load: OfferedLoad) -> None:
    while True:
        print(load.line(), flush=True)
        await asyncio.sleep(1)


async def run(address: str, streams: int, seconds: float, num_tokens: int, num_channels: int) -> OfferedLoad:
    load = OfferedLoad(Speech(), num_tokens, time.monotonic() + seconds)
    async with ClientConnections(address, num_channels) as made:
        reporting = asyncio.create_task(report(load))
        await asyncio.gather(*(load.stream(made.stubs[index % num_channels]) for index in range(streams)))
        reporting.cancel()
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--channels", type=int, default=16)
    args = parser.parse_args()
    load = uvloop.run(run(args.address, args.streams, args.seconds, args.tokens, args.channels))
    print(load.line(), flush=True)


if __name__ == "__main__":
    main()
