"""A gateway that leaves its ports to another: no call that has come to it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.gateway.troupe import front

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
