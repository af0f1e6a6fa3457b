"""A gateway that leaves its ports to another: no call that has come to it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1 import inference_pb2
from services.gateway.grpc.listening import stop_listening
from tests.unit.gateway.troupe import LAST, failure, front

NUM_CALLS = 300


async def test_calls_that_come_with_the_end_are_answered_and_none_is_cancelled() -> None:
    async with front(share_port=True) as f:
        stub: Any = health_pb2_grpc.HealthStub(f.channel)
        await stub.Check(health_pb2.HealthCheckRequest())  # a connection

        async def ask() -> str:
            try:
                await stub.Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        calls = [asyncio.create_task(ask()) for _ in range(NUM_CALLS)]
        await asyncio.sleep(0.01)  # on their way, and some of them there
        assert not all(call.done() for call in calls)
        await f.troupe.gateway.server.hand_over(5.0)
        endings = Counter(await asyncio.gather(*calls))
        assert endings == {"OK": NUM_CALLS}


async def test_the_port_is_left_before_the_calls_of_connections_that_are_there() -> None:
    async with front(share_port=True) as f:
        port = f.troupe.gateway.server.port
        stub: Any = health_pb2_grpc.HealthStub(f.channel)
        await stub.Check(health_pb2.HealthCheckRequest())  # a connection
        leaving = asyncio.create_task(f.troupe.gateway.server.hand_over(5.0))
        await asyncio.sleep(0)  # it has begun
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await stub.Check(health_pb2.HealthCheckRequest())
        assert not leaving.done(), "the first call of a connection that was just made would still be served"
        await leaving


async def test_another_port_of_the_process_goes_on_listening() -> None:
    server, other = [await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) for _ in range(2)]
    async with server, other:
        port, other_port = server.sockets[0].getsockname()[1], other.sockets[0].getsockname()[1]
        assert stop_listening(port) == 1
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", other_port)
        assert await reader.read() == b"", "it was taken, and closed"
        writer.close()
        await writer.wait_closed()
        assert stop_listening(port) == 0


async def test_a_stream_has_longer_where_others_stay_than_where_all_stop() -> None:
    async with front(share_port=True, drain_timeout=0.1) as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x"))
        request = await f.troupe.request()
        f.troupe.gateway.request_handover()
        await asyncio.sleep(0.3)
        f.troupe.say(request, "bye", **LAST)
        assert [response.text async for response in call] == ["bye"]


async def test_who_leaves_alone_and_is_then_told_that_all_stop_makes_haste() -> None:
    async with front(share_port=True, drain_timeout=0.1) as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x"))
        await f.troupe.request()
        f.troupe.gateway.request_handover()
        f.troupe.gateway.request_drain()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and error.details() == "the server is shutting down"
