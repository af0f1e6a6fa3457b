"""What a gateway's health says of the others: of who is missing, and of work that does not go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1.inference_pb2 import GenerateRequest
from services.gateway.actor import GatewayActor
from shared.actor.status import read_status
from shared.clocks.epochs import MAX_LEAP
from shared.config import Settings
from shared.errors import FatalError
from shared.messages import Roster, ServiceName
from shared.transport import Inbox, MemoryTransport
from tests.unit.gateway.troupe import CAPACITY, LAST, Front, front, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def until_health_is(f: Front, wanted: int) -> None:
    stub: Any = health_pb2_grpc.HealthStub(f.channel)
    async with asyncio.timeout(30):
        while (await stub.Check(health_pb2.HealthCheckRequest())).status != wanted:
            await asyncio.sleep(0.01)


def stalled(f: Front, reason: str, **changes: int) -> Roster:
    f.troupe.version += 1
    epoch = changes.get("epoch", f.troupe.epoch)
    return Roster(epoch, f.troupe.version, f.troupe.members(), CAPACITY, 512, 500, reason)


async def test_work_that_does_not_go_on_is_not_serving_but_requests_are_taken(tmp_path: Path) -> None:
    status = tmp_path / "status"
    async with front(status_file=str(status)) as f:
        await until_health_is(f, SERVING)
        await until(lambda: read_status(status) == "READY")
        f.troupe.tell(stalled(f, "worker-a: a step has not ended within 5 s"))
        await until_health_is(f, NOT_SERVING)
        await until(lambda: read_status(status) == "NOT_SERVING")
        call = f.inference.Generate(GenerateRequest(text="patient"))
        request = await f.troupe.request()
        f.troupe.tell(stalled(f, ""))
        await until_health_is(f, SERVING)
        f.troupe.say(request, "at last", **LAST)
        assert (await call.read()).text == "at last"


async def test_a_missing_service_is_not_serving() -> None:
    async with front() as f:
        f.troupe.announce(ServiceName.WORKER)
        await until_health_is(f, NOT_SERVING)
        f.troupe.announce()
        await until_health_is(f, SERVING)


async def test_a_roster_of_another_time_changes_nothing() -> None:
    async with front() as f:
        gateway, known = f.troupe.gateway, f.troupe.gateway.roster
        dropped = gateway.num_dropped
        for epoch in (2 * MAX_LEAP, 2**63, 2**64 - 1, -1):
            f.troupe.tell(Roster(epoch, 1, [], None, 0, 0, "no actor is ready"))
        f.troupe.tell(Roster(0, 10**9, [], None, 0, 0, "no actor is ready"))
        await until(lambda: gateway.num_dropped == dropped + 4)
        await asyncio.sleep(0.05)
        assert gateway.roster == known and not gateway.readiness.unwell


async def test_a_gateway_that_is_cut_off_for_good_ends_so_that_another_life_may_find_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryTransport()
    settings = Settings.of(model="tiny", port=0, http_port=-1, heartbeat_interval=0.02, resume_timeout=0.05)
    gateway = GatewayActor(network, settings, "gateway-test")
    running = asyncio.create_task(gateway.run())
    await asyncio.sleep(0.3)
    assert not running.done(), "a scheduler that is only late is waited for"
    monkeypatch.setattr(Inbox, "is_cut_off", True)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 5)
    assert caught.group_contains(FatalError, match="no network")
