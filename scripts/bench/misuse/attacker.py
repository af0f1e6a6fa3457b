"""Misuses a gateway: a process of its own, so that what it does is not its victims' time.

    python -m scripts.bench.misuse.attacker --grpc HOST:PORT --http HOST:PORT      its doors
    python -m scripts.bench.misuse.attacker --grpc HOST:PORT [--salts 60]          its compilers of formats

Its input says what to send, for how many seconds, and how many seconds lie between two of them at least
(`scripts/bench/common/disturbance.py`, `obey`).

It has the same processors as its victims, which an attacker on another machine would not: so requests are encoded
before anything is measured (a megabyte takes this process longer than the gateway), and sent from where they lie.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count, cycle, repeat
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.clients import ClientConnections
from scripts.bench.common.disturbance import AttackOutcome, obey
from scripts.bench.misuse.hostile import hostile
from shared.client.client import sampling_proto

MEGABYTE = 1 << 20
TENANT = "attacker"  # of misuse of the doors; the other clients name none
NUM_SENDERS = 4
NUM_HALVES = 30
HALF = 31 * MEGABYTE
SEND_BUFFER = 256 << 10  # bytes
FEW_TOKENS = 8  # of a hostile format that is served after all
TIMEOUT = 20.0  # seconds, of a request with a format
SERVED = "served"
GENERATE = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"

Request = tuple[str, bytes]  # what it is, and its encoding
Send = Callable[[bytes, float], Awaitable[str]]  # within so many seconds; returns how it ended
Attack = Callable[[float, float], Awaitable[AttackOutcome]]


async def again_and_again(
    send: Send, requests: Iterator[Request], num_senders: int, seconds: float, pace: float
) -> AttackOutcome:
    """So many senders, each one request after the other; `pace`: seconds from one of a sender to its next, at least."""
    slowest: dict[str, float] = {}
    endings: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def sender() -> None:
        while (left := until - time.monotonic()) > 0:
            name, encoded = next(requests)
            begin = time.perf_counter()
            endings[await send(encoded, left)] += 1
            took = time.perf_counter() - begin
            slowest[name] = max(slowest.get(name, 0.0), took)
            await asyncio.sleep(max(0.0, pace - took))

    await asyncio.gather(*(sender() for _ in range(num_senders)))
    return AttackOutcome(slowest, endings)


async def over_http(address: str, request: bytes, seconds: float) -> str:
    """A request over a connection of its own; returns the status, or how the connection ended.

    The kernel takes no more of it than is about to leave.
    """
    loop, (host, _, port) = asyncio.get_running_loop(), address.rpartition(":")
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sending: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(connection, (host, int(port)))
                sending = asyncio.create_task(loop.sock_sendall(connection, request))
                return (await loop.sock_recv(connection, 1024)).split()[1].decode()
        except TimeoutError:
            return "still open"
        except (OSError, IndexError):
            return "cut off"
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


def over_grpc(channel: grpc.aio.Channel, tenant: str, timeout: float | None = None) -> Send:
    """Calls with messages that are encoded already; `timeout`: where it is not what is left of the attack."""
    call: Any = channel.unary_stream(GENERATE, None, None)
    metadata = (("x-tenant", tenant),) if tenant else ()

    async def send(encoded: bytes, seconds: float) -> str:
        try:
            async for _ in call(encoded, timeout=timeout or seconds, metadata=metadata):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return SERVED

    return send


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-tenant: {TENANT}\r\n"
        f"content-length: {length or len(body)}\r\n\r\n"
    )
    return head.encode() + body


def on_doors(http: str, channels: list[grpc.aio.Channel]) -> dict[str, Attack]:
    refused = post("/v1/completions", json.dumps({"model": "none", "prompt": "x" * (4 * MEGABYTE)}).encode())
    tokenize = post("/tokenize", json.dumps({"prompt": "once upon a time " * (4 * MEGABYTE // 17)}).encode())
    half = post("/v1/completions", b" " * (HALF - 1), HALF)
    message = inference_pb2.GenerateRequest(model="none", text="x" * (4 * MEGABYTE)).SerializeToString()
    calls = cycle([over_grpc(channel, TENANT) for channel in channels])
    ways: dict[str, tuple[Send, bytes, int]] = {
        "refused over HTTP": (partial(over_http, http), refused, NUM_SENDERS),
        "4 MB tokenized": (partial(over_http, http), tokenize, NUM_SENDERS),
        "bodies half-way": (partial(over_http, http), half, NUM_HALVES),
        "refused over gRPC": (lambda encoded, seconds: next(calls)(encoded, seconds), message, NUM_SENDERS),
    }
    return {
        kind: partial(again_and_again, send, repeat((kind, request)), num_senders)
        for kind, (send, request, num_senders) in ways.items()
    }


def with_formats(channel: grpc.aio.Channel, num_salts: int) -> dict[str, Attack]:
    made = [(name, generate(grammar)) for salt in range(num_salts) for name, grammar in hostile(salt).items()]
    harmless = (("harmless", generate({"regex": f"[a-z ,.]+{number}"})) for number in count())
    attacker, other = over_grpc(channel, "", TIMEOUT), over_grpc(channel, "harmless", TIMEOUT)  # it has no debt
    return {
        "hostile": partial(again_and_again, attacker, cycle(made), 1),
        "harmless": partial(again_and_again, other, harmless, 1),
        "plain": partial(again_and_again, other, repeat(("plain", generate(None))), 1),
    }


def generate(grammar: dict[str, Any] | None) -> bytes:
    sampling = sampling_proto({"grammar": grammar, "max_tokens": FEW_TOKENS})
    return bytes(inference_pb2.GenerateRequest(text="Once", sampling=sampling).SerializeToString())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--http", default="")
    parser.add_argument("--salts", type=int, default=60, help="sets of grammars made before the first attack")
    args = parser.parse_args()
    async with ClientConnections(args.grpc, NUM_SENDERS) as made:
        await obey(on_doors(args.http, made.channels) if args.http else with_formats(made.channels[0], args.salts))


if __name__ == "__main__":
    asyncio.run(main())
