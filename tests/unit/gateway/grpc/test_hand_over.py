"""A gateway that leaves its ports to another: no call that has come to it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1 import inference_pb2
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
