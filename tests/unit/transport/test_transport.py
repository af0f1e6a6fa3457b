"""Bytes between actors: order, batches, bad frames, privacy; over sockets and in memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

from shared.config import Settings
from shared.messages import AbortRequest, SchedulerInbox, encode
from shared.transport import MemoryTransport, Transport, make_transport, pick, rank
from shared.transport.zeromq import ZmqTransport


@pytest.fixture(params=["memory", "ipc", "tcp"])
async def transport(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Transport]:
    made: Transport
    if request.param == "memory":
        made = MemoryTransport()
    else:
        run = str(tmp_path / "run")
        made = make_transport(
            Settings.of(transport=request.param, runtime_dir=run, advertise_host="127.0.0.1").deployment
        )
    yield made
    made.close()


async def test_messages_arrive_in_order_and_in_batches(transport: Transport) -> None:
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    for index in range(1000):
        outbox.send(inbox.address, AbortRequest(str(index)))
        if index % 100 == 99:
            outbox.flush()
    received: list[str] = []
    num_batches = 0
    while len(received) < 1000:
        received += [message.request_id for message in await asyncio.wait_for(inbox.recv_batch(), 5)]
        num_batches += 1
    assert received == [str(index) for index in range(1000)]
    assert num_batches <= 10
    outbox.close()
    inbox.close()


async def test_mail_to_oneself_needs_no_wire(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    inbox.post(AbortRequest("mine"))
    assert await inbox.recv_batch() == [AbortRequest("mine")]
    inbox.close()


async def test_an_undecodable_frame_costs_only_itself(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    inbox.deliver([encode(AbortRequest("1")), b"\xc1garbage", encode(AbortRequest("2"))])
    assert await inbox.recv_batch() == [AbortRequest("1"), AbortRequest("2")]
    assert inbox.num_undecodable == 1
    inbox.close()


async def test_a_cancelled_receive_loses_nothing(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    waiting = asyncio.create_task(inbox.recv_batch())
    await asyncio.sleep(0.01)
    inbox.post(AbortRequest("kept"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if waiting.cancelled():
        assert await inbox.recv_batch() == [AbortRequest("kept")]
    inbox.close()


def test_rendezvous_moves_only_what_it_must() -> None:
    members = [f"m{index}" for index in range(5)]
    before = {str(key): pick(str(key), members) for key in range(2000)}
    after = {key: pick(key, [m for m in members if m != "m3"]) for key in before}
    assert all(after[key] == owner for key, owner in before.items() if owner != "m3")
    counts = [list(before.values()).count(member) for member in members]
    assert min(counts) > 300
    assert rank("key", members)[0] == pick("key", members)
    assert pick("key", []) is None


ELSEWHERE = (
    "", "ipc://", "ipc:///var/run/other.sock", "ipc://{run}/../other.sock", "ipc://{run}/a\0b.sock", "ipc://{run}/a",
    "tcp://*:5550", "tcp://10.0.0.1", "tcp://10.0.0.1:99999999", "tcp://a b:1", "tcp://;rm:1", "inproc://x", "memory://nobody",
    "\ud800", "ipc://{run}/" + "x" * 200 + ".sock", "tcp://" + "x" * 400 + ":1",
)  # fmt: skip


@pytest.mark.parametrize("address", ELSEWHERE, ids=range(len(ELSEWHERE)))
async def test_an_address_that_is_none_of_ours_costs_only_its_mail(
    address: str, transport: Transport, tmp_path: Path
) -> None:
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    outbox.send(address.replace("{run}", str(tmp_path / "run")), AbortRequest("lost"))
    outbox.send(inbox.address, AbortRequest("kept"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("kept")]
    outbox.close()
    inbox.close()


@pytest.mark.parametrize(
    ("kind", "elsewhere"), [("ipc", "ipc://{run}/{index}.sock"), ("tcp", "tcp://127.0.0.1:{index}")]
)
async def test_a_million_destinations_are_not_a_million_sockets(
    kind: Literal["ipc", "tcp"], elsewhere: str, tmp_path: Path
) -> None:
    settings = Settings.of(transport=kind, runtime_dir=str(tmp_path), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings.deployment)
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    for index in range(20_000, 21_200):
        outbox.send(elsewhere.format(run=tmp_path, index=index), AbortRequest("lost"))
        outbox.send(inbox.address, AbortRequest(str(index)))
        outbox.flush()
    received: list[str] = []
    while len(received) < 1200:
        received += [message.request_id for message in await asyncio.wait_for(inbox.recv_batch(), 5)]
    assert received == [str(index) for index in range(20_000, 21_200)]
    assert len(outbox.destinations) <= 512
    for address in outbox.destinations:
        outbox.forget(address)
    inbox.close()
    transport.close()
