"""The end of a destination is noticed at once, and what is no end is not taken for one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import zmq

from shared.config import DeploymentSettings, Settings
from shared.messages import AbortRequest, SchedulerInbox
from shared.transport import Inbox
from shared.transport.outbox import ZmqOutbox
from shared.transport.tcp import RETURN_SECONDS
from shared.transport.zeromq import ZmqTransport

ROOT = Path(__file__).resolve().parents[3]
Kind = Literal["ipc", "tcp"]


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[ZmqTransport]:
    made = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path / "run")))
    yield made
    made.close()


def watching(outbox: ZmqOutbox) -> asyncio.Queue[str]:
    gone: asyncio.Queue[str] = asyncio.Queue()
    outbox.on_gone = gone.put_nowait
    return gone


async def deliver(outbox: ZmqOutbox, inbox: Inbox[Any], word: str) -> None:
    outbox.send(inbox.address, AbortRequest(word))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(word)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_the_end_of_an_idle_destination_is_noticed(transport: ZmqTransport) -> None:
    outbox = transport.outbox()
    gone = watching(outbox)
    inbox, other = transport.bind("a", SchedulerInbox), transport.bind("b", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    await deliver(outbox, other, "two")
    await asyncio.sleep(0.05)
    assert gone.empty()
    inbox.close()
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    await deliver(outbox, other, "three")
    assert gone.empty()
    outbox.close()


async def test_a_send_to_a_destination_that_has_ended_tells_of_it_once(transport: ZmqTransport) -> None:
    outbox = transport.outbox()
    gone = watching(outbox)
    inbox = transport.bind("a", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    inbox.close()
    outbox.send(inbox.address, AbortRequest("late"))
    outbox.flush()  # before the event loop has seen the end
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    await asyncio.sleep(0.2)
    assert gone.empty()
    outbox.forget(inbox.address)


async def test_the_end_of_the_next_life_is_noticed_too(transport: ZmqTransport) -> None:
    """A worker that starts again as the same instance has the address of its former life."""
    outbox = transport.outbox()
    gone = watching(outbox)
    for _ in range(3):
        inbox = transport.bind("a", SchedulerInbox)
        await deliver(outbox, inbox, "one")
        inbox.close()
        assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    outbox.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_connection_that_is_made_anew_at_once_is_no_loss(kind: Kind, tmp_path: Path) -> None:
    settings = Settings.of(transport=kind, runtime_dir=str(tmp_path), scheduler_port=free_port())
    name = "scheduler" if kind == "tcp" else "a"  # whose port is known
    transport = ZmqTransport(settings.deployment)
    outbox = transport.outbox()
    gone = watching(outbox)
    inbox = transport.bind(name, SchedulerInbox)
    await deliver(outbox, inbox, "one")
    inbox.close()
    inbox = await bound_again(transport, name)
    outbox.send(inbox.address, AbortRequest("two"))
    outbox.flush()
    await asyncio.sleep(2 * RETURN_SECONDS)
    assert gone.empty()
    inbox.close()
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    outbox.close()
    transport.close()


async def bound_again(transport: ZmqTransport, name: str) -> Inbox[Any]:
    """As soon as ZeroMQ has given back the address."""
    async with asyncio.timeout(5):
        while True:
            try:
                return transport.bind(name, SchedulerInbox)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


async def test_what_was_not_there_yet_or_was_forgotten_has_not_gone(transport: ZmqTransport, tmp_path: Path) -> None:
    outbox = transport.outbox()
    gone = watching(outbox)
    outbox.send(f"ipc://{tmp_path}/run/late.sock", AbortRequest("patient"))
    outbox.flush()
    inbox = transport.bind("a", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    outbox.forget(inbox.address)
    inbox.close()
    await asyncio.sleep(0.2)
    assert gone.empty()
    outbox.close()


LISTENER = """
import sys, time
from shared.config import DeploymentSettings
from shared.messages import SchedulerInbox
from shared.transport.zeromq import ZmqTransport
import asyncio

async def main():
    settings = DeploymentSettings(transport=sys.argv[1], runtime_dir=sys.argv[2], advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    inbox = transport.bind("a", SchedulerInbox)
    print(inbox.address, flush=True)
    while True:
        await inbox.recv_batch()
        print("heard", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_process_that_ends_is_noticed_before_its_heartbeats_are_missed(kind: Kind, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    settings = Settings.of(transport=kind, runtime_dir=run, advertise_host="127.0.0.1")
    transport = ZmqTransport(settings.deployment)
    listener = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LISTENER, kind, run, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert listener.stdout is not None
    address = (await asyncio.wait_for(listener.stdout.readline(), 30)).decode().strip()
    outbox, gone = transport.outbox(), asyncio.Queue[str]()
    outbox.on_gone = gone.put_nowait
    outbox.send(address, AbortRequest("x"))
    outbox.flush()
    assert await asyncio.wait_for(listener.stdout.readline(), 10) == b"heard\n"
    await asyncio.sleep(2 * RETURN_SECONDS)
    assert gone.empty(), "no peer that is there is taken for gone"
    listener.kill()
    assert await asyncio.wait_for(gone.get(), settings.deployment.heartbeat_timeout) == address
    await listener.wait()
    outbox.forget(address)
    outbox.close()
    transport.close()
