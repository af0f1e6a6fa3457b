"""Misuses a gateway's doors: a process of its own, so that what it does is not its victims' time.

    python -m scripts.bench.doors.attacker --grpc HOST:PORT --http HOST:PORT

Its input says what to do and for how many seconds (`scripts/bench/common/disturbance.py`, `obey`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.disturbance import AttackOutcome, obey

MEGABYTE = 1 << 20
TENANT = "attacker"  # the other clients name none
NUM_SENDERS = 4
NUM_HALVES = 30
HALF = 31 * MEGABYTE
SEND_BUFFER = 256 << 10  # bytes
GENERATE = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"

Attack = Callable[[float, float], Awaitable[AttackOutcome]]


class Http:
    """Requests over connections of their own, as bytes that were made before."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def send(self, request: bytes, seconds: float) -> str:
        """Returns the status, or how the connection ended.

        The attacker has the same processors as its victims, so it does as little as one elsewhere would: the request
        goes from where it lies, and the kernel takes no more of it than is about to leave.
        """
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            sending: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(seconds):
                    await loop.sock_connect(connection, (self._host, int(self._port)))
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

    async def again_and_again(self, request: bytes, num_senders: int, seconds: float, pace: float) -> AttackOutcome:
        """So many senders, each one request after the other; they know no pace."""
        endings: Counter[str] = Counter()
        until = time.monotonic() + seconds

        async def sender() -> None:
            while (left := until - time.monotonic()) > 0:
                endings[await self.send(request, left)] += 1

        await asyncio.gather(*(sender() for _ in range(num_senders)))
        return AttackOutcome(endings=endings)


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-tenant: {TENANT}\r\n"
        f"content-length: {length or len(body)}\r\n\r\n"
    )
    return head.encode() + body


def http_attacks(address: str) -> dict[str, Attack]:
    http = Http(address)
    refused = post("/v1/completions", json.dumps({"model": "none", "prompt": "x" * (4 * MEGABYTE)}).encode())
    tokenize = post("/tokenize", json.dumps({"prompt": "once upon a time " * (4 * MEGABYTE // 17)}).encode())
    half = post("/v1/completions", b" " * (HALF - 1), HALF)
    return {
        "refused over HTTP": partial(http.again_and_again, refused, NUM_SENDERS),
        "4 MB tokenized": partial(http.again_and_again, tokenize, NUM_SENDERS),
        "bodies half-way": partial(http.again_and_again, half, NUM_HALVES),
    }


async def refused_over_grpc(address: str, seconds: float, pace: float) -> AttackOutcome:
    message = inference_pb2.GenerateRequest(model="none", text="x" * (4 * MEGABYTE)).SerializeToString()
    endings: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def sender() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            method: Any = channel.unary_stream(GENERATE, None, None)
            while (left := until - time.monotonic()) > 0:
                call = method(message, metadata=(("x-tenant", TENANT),), timeout=left)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    endings[error.code().name] += 1

    await asyncio.gather(*(sender() for _ in range(NUM_SENDERS)))
    return AttackOutcome(endings=endings)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--http", required=True)
    args = parser.parse_args()
    await obey(http_attacks(args.http) | {"refused over gRPC": partial(refused_over_grpc, args.grpc)})


if __name__ == "__main__":
    asyncio.run(main())
