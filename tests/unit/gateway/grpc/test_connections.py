"""Connections of the gRPC front: how many, from where, and how long one may be there without a call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.pageant.v1 import inference_pb2_grpc
from protos.pageant.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from services.gateway.access.connections import FEWEST
from services.gateway.grpc.peers import PeerWatch, inode_of
from tests.unit.gateway.troupe import LAST, Front, front

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def idle(f: Front, count: int, first: bytes = b"") -> AsyncIterator[list[Pair]]:
    port = f.troupe.gateway.server.port
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in made:
        writer.write(first)
    yield made
    for _, writer in made:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ends(pair: Pair) -> bool:
    async with asyncio.timeout(20):
        try:
            while await pair[0].read(1 << 16):
                pass
        except ConnectionError:
            pass
    return True


async def still_open(pairs: list[Pair]) -> int:
    """How many have not been closed by the server."""
    count = 0
    for reader, _ in pairs:
        try:
            async with asyncio.timeout(0.01):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            count += 1
        except ConnectionError:
            pass
    return count


async def test_above_the_most_the_next_is_closed_and_calls_go_on() -> None:
    async with front(max_connections=FEWEST) as f:
        call = f.inference.Generate(GenerateRequest(text="x"))
        request = await f.troupe.request()
        async with idle(f, 40) as many:
            async with asyncio.timeout(20):
                while await still_open(many) > FEWEST:
                    await asyncio.sleep(0.05)
            f.troupe.say(request, "done", **LAST)
            assert (await call.read()).text == "done"
            assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_a_host_of_ipv6_is_given_with_brackets_or_without(host: str) -> None:
    async with (
        front(host=host, http_port=0) as f,
        grpc.aio.insecure_channel(f"[::1]:{f.troupe.gateway.server.port}") as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        assert len((await stub.ListModels(ListModelsRequest())).models) == 1


async def test_a_connection_without_a_handshake_or_without_a_call_ends() -> None:
    async with front(header_timeout=0.5, idle_timeout=1) as f:
        async with idle(f, 3) as silent, idle(f, 3, PREFACE) as greeted, idle(f, 3, PREFACE[:10]) as half:
            for pair in (*silent, *greeted, *half):
                assert await ends(pair)
        assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1


async def test_the_most_holds_however_many_addresses_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerWatch, "look", lambda self: None)
    patient = front(max_connections=FEWEST, header_timeout=60)  # a shorter one would let go of them in the end
    async with patient as f, idle(f, 20) as many, asyncio.timeout(20):
        while await still_open(many) > FEWEST:
            await asyncio.sleep(0.05)


async def test_who_never_greets_is_let_go_of_long_before_who_is_idle() -> None:
    async with (
        front(header_timeout=0.5, idle_timeout=60) as f,
        idle(f, 1) as silent,
        idle(f, 1, PREFACE[:10]) as half,
        idle(f, 1, PREFACE) as greeted,
    ):
        for pair in (*silent, *half):
            assert await ends(pair)
        assert await still_open(greeted) == 1


async def test_an_address_with_too_many_loses_its_newest_and_keeps_its_calls() -> None:
    async with front() as f:
        call = f.inference.Generate(GenerateRequest(text="x"))
        request = await f.troupe.request()
        watch = PeerWatch(f.troupe.gateway.server.port, per_address=6)
        watch.look()
        async with idle(f, 20, PREFACE) as many:
            async with asyncio.timeout(30):
                while watch.num_ended < 15:  # the oldest is the call's own
                    watch.look()
                    await asyncio.sleep(0.01)
                while await still_open(many) > 5:
                    await asyncio.sleep(0.05)
            for _ in range(5):
                watch.look()
            assert await still_open(many) == 5 and watch.num_ended == 15
        f.troupe.say(request, "done", **LAST)
        assert (await call.read()).text == "done"


async def test_a_connection_made_just_before_a_crowd_is_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look came in between, and inodes say nothing of age: here they grow the wrong way."""
    real = inode_of
    monkeypatch.setattr("services.gateway.grpc.peers.inode_of", lambda name: real(name) and 10_000_000 - int(name))
    async with front() as f:
        call = f.inference.Generate(GenerateRequest(text="x"))
        request = await f.troupe.request()
        watch = PeerWatch(f.troupe.gateway.server.port, per_address=6)
        async with idle(f, 20, PREFACE) as many:
            async with asyncio.timeout(30):
                while watch.num_ended < 15:
                    watch.look()
                    await asyncio.sleep(0.01)
                while await still_open(many) > 5:
                    await asyncio.sleep(0.05)
        f.troupe.say(request, "done", **LAST)
        assert (await call.read()).text == "done"


async def test_the_gateway_itself_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.grpc.peers.LOOK_SECONDS", 0.05)
    async with front(max_connections_per_address=3) as f:
        await f.inference.ListModels(ListModelsRequest())
        await asyncio.sleep(0.2)
        async with idle(f, 9, PREFACE) as many:
            async with asyncio.timeout(30):
                while await still_open(many) > 2:
                    await asyncio.sleep(0.05)
            assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1


def test_what_is_no_socket_has_no_inode() -> None:
    assert inode_of("0") == 0 or inode_of("0") > 0
    assert inode_of("987654") == 0


async def test_clients_come_back_after_an_idle_time() -> None:
    async with front(idle_timeout=1) as f:
        await f.inference.ListModels(ListModelsRequest())
        await asyncio.sleep(2.5)
        assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1
        state = f.channel.get_state()
        assert state is grpc.ChannelConnectivity.READY
