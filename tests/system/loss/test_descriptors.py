"""A real troupe whose processes may have few descriptors, and clients that want them all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.processes.descriptors import raise_limit
from shared.processes.proc import own_seconds, stat
from tests.system.harness import Answer, Troupe, ask, streaming, troupe

DESCRIPTORS = 300
NUM_IDLE = 1000
NUM_STREAMS = 12
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nx-slow: "
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    if raise_limit() < NUM_IDLE + 200:
        pytest.skip("this process may not have enough descriptors to attack with")
    with troupe(tmp_path_factory.mktemp("few"), "--num-threads", "1", descriptors=DESCRIPTORS) as started:
        yield started


@contextlib.asynccontextmanager
async def crowd(host: str, port: int, first: bytes) -> AsyncIterator[list[socket.socket]]:
    """Many connections that say this and no more."""
    loop = asyncio.get_running_loop()
    made: list[socket.socket] = []
    try:
        for _ in range(NUM_IDLE):
            one = socket.socket()
            made.append(one)
            one.setblocking(False)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(5):
                    await loop.sock_connect(one, (host, port))
                    await loop.sock_sendall(one, first)
        yield made
    finally:
        for one in made:
            one.close()


def join_the_bus(running: Troupe) -> None:
    """Connect to every service as a new one does: ZeroMQ ends a process that has no descriptor for it."""
    for path in (running.log_dir.parent / "run").glob("*-*.sock"):
        with socket.socket(socket.AF_UNIX) as newcomer:
            newcomer.connect(str(path))
            newcomer.settimeout(5)
            assert newcomer.recv(1), f"{path} says nothing"


def seconds_of(pid: int) -> float:
    """Of a processor, that a process has had."""
    fields = stat(pid)
    assert fields is not None
    return own_seconds(fields)


def health(running: Troupe) -> int:
    try:
        with urllib.request.urlopen(f"{running.url}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("front", "first"),
    [("http", b""), ("http", HALF_A_HEAD), ("grpc", b""), ("grpc", PREFACE)],
    ids=["idle HTTP", "slow headers", "silent gRPC", "idle gRPC"],
)
def test_a_thousand_idle_connections_cost_streams_nothing(running: Troupe, front: str, first: bytes) -> None:
    requests = [ask("Once upon a time", max_tokens=150, seed=n, ignore_eos=True) for n in range(NUM_STREAMS)]
    expected = running.generate(requests)
    address = running.address if front == "grpc" else running.url.removeprefix("http://")
    host, _, port = address.partition(":")
    (gateway,) = running.pids("gateway")

    async def attacked() -> tuple[list[list[Answer]], int, float]:
        async with running.channel() as channel:
            streams = await streaming(channel, requests)
            async with crowd(host, int(port), first):
                status = await asyncio.to_thread(health, running)
                await asyncio.to_thread(join_the_bus, running)
                answers = await asyncio.gather(*streams)
                before, since = seconds_of(gateway), time.monotonic()
                await asyncio.sleep(2)
                busy = (seconds_of(gateway) - before) / (time.monotonic() - since)
            return answers, status, busy

    answers, status, busy = asyncio.run(attacked())
    assert [[one.text for one in answer] for answer in answers] == [[one.text for one in answer] for answer in expected]
    assert status in (200, 503)
    assert busy < 0.6, "a gateway without work does not spin"
    assert running.pids("gateway") == [gateway]
    assert not [line for line in running.logs() if line["event"] in ("lost", "fatal")]
