"""The scheduler's shell: a worker that was there before the gateway could say what is alive has to go again."""

from __future__ import annotations

import asyncio

import msgspec

from services.scheduler.main import make
from shared.config import Settings
from shared.messages import Hello, Refused, ServiceName, WorkerInbox, schema_hash
from shared.transport import MemoryTransport
from tests.unit.scheduler.membership.test_deployment import MINE, gateway, other, worker


async def test_a_worker_that_was_quicker_is_refused_after_all() -> None:
    network = MemoryTransport()
    scheduler = make(network, Settings.of(heartbeat_interval=0.05, heartbeat_timeout=30.0))
    inboxes = {name: network.bind(name, WorkerInbox) for name in ("quick", "right")}
    running = asyncio.create_task(scheduler.run())

    async def say(hello: Hello) -> None:
        address = inboxes[hello.instance].address if hello.instance in inboxes else "memory://gone"
        scheduler.post(msgspec.structs.replace(hello, address=address, schema_hash=schema_hash()))
        await asyncio.sleep(0.1)

    await say(worker("quick", other("dtype")))
    assert list(scheduler.core.replicas) == ["quick"]
    await say(gateway("g", MINE))
    assert not scheduler.core.replicas
    refusals = [one for one in await inboxes["quick"].recv_batch() if isinstance(one, Refused)]
    assert refusals and "its dtype is 'another'" in refusals[0].reason
    await say(worker("quick", other("dtype")))
    assert not scheduler.core.replicas
    await say(worker("right"))
    assert list(scheduler.core.replicas) == ["right"]
    assert scheduler.core.replicas["right"].capacity.fingerprint == MINE.name
    assert {member.service for member in scheduler.membership.members} == {ServiceName.WORKER, ServiceName.GATEWAY}
    scheduler.request_drain()
    await running
