"""A full table of descriptors: the bus has a reserve, listeners rest, and no peer is taken for one that left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from services.gateway.http.connection.listener import accept
from shared.actor import Actor, process
from shared.config import DeploymentSettings, Settings
from shared.messages import AbortRequest, SchedulerInbox
from shared.processes import descriptors
from shared.processes.descriptors import Spares, raise_limit
from shared.transport import Inbox, Outbox, Transport, ipc, outbox, watch
from shared.transport.directory import listening
from shared.transport.zeromq import NUM_SPARES, ZmqTransport


@contextlib.contextmanager
def full_table() -> Iterator[list[int]]:
    """No descriptor is left; those that fill the table may be closed one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filling: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 200, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.open(os.devnull, os.O_RDONLY))
        yield filling
    finally:
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def free(filling: list[int], count: int) -> None:
    for _ in range(count):
        os.close(filling.pop())


def test_the_soft_limit_becomes_the_hard_one_within_reason() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
        assert raise_limit(most=700) == min(700, hard)
        assert raise_limit(most=600) == min(700, hard), "it is never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_spare_is_given_up_for_what_needs_one_and_had_again_later() -> None:
    spares = Spares(2)
    with full_table() as filling:
        first = spares.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        second = spares.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError) as none_left:
            spares.attempt(lambda: os.open(os.devnull, os.O_RDONLY))
        assert none_left.value.errno == errno.EMFILE and len(spares) == 0
        free(filling, 4)
        spares.refill()
        assert len(spares) == 2
        os.close(first)
        os.close(second)
    spares.close()


def test_what_fails_for_another_reason_costs_no_spare() -> None:
    spares = Spares(2)
    with pytest.raises(FileNotFoundError):
        spares.attempt(lambda: os.open("/nowhere/at/all", os.O_RDONLY))
    assert len(spares) == 2
    spares.close()


async def test_the_bus_connects_and_accepts_while_others_have_every_descriptor(tmp_path: Path) -> None:
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    inbox, sender = transport.bind("a", SchedulerInbox), transport.outbox()
    with full_table():
        await arrives(inbox, sender, "through")
    sender.close()
    transport.close()
    assert NUM_SPARES >= 8


async def test_a_listener_without_a_descriptor_rests_and_takes_the_connection_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[socket.socket] = []
    listener = listening(tmp_path / "a.sock")
    accepting = asyncio.create_task(accept(listener, lambda connection, _: taken.append(connection)))
    client = socket.socket(socket.AF_UNIX)
    with full_table() as filling:
        client.connect(str(tmp_path / "a.sock"))
        before = time.process_time()
        await asyncio.sleep(1.2)
        assert time.process_time() - before < 0.8, "the loop does not spin"
        free(filling, 2)
        async with asyncio.timeout(10):
            while not taken:
                await asyncio.sleep(0.05)
    pauses = [line for line in capsys.readouterr().out.splitlines() if "accept_paused" in line]
    assert 1 <= len(pauses) <= 3, "it tries twice a second, and logs the first, second and fourth time"
    client.close()
    taken[0].close()
    accepting.cancel()
    listener.close()


async def test_without_a_descriptor_to_find_out_with_no_destination_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    sender, gone = transport.outbox(), asyncio.Queue[str]()
    sender.on_gone = gone.put_nowait
    inbox = transport.bind("a", SchedulerInbox)
    await arrives(inbox, sender, "one")
    with monkeypatch.context() as patch:
        patch.setattr(ipc, "answers", no_descriptor)
        inbox.close()
        await asyncio.sleep(0.3)
        assert gone.empty(), "it cannot be told"
        inbox = transport.bind("a", SchedulerInbox)
        await arrives(inbox, sender, "two")
    await asyncio.sleep(0.1)
    assert gone.empty(), "it was back in time"
    with monkeypatch.context() as patch:
        patch.setattr(ipc, "answers", no_descriptor)
        inbox.close()
        await asyncio.sleep(0.1)
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address, "now it has left"
    sender.close()
    transport.close()


async def arrives(inbox: Inbox[Any], sender: Outbox, word: str) -> None:
    sender.send(inbox.address, AbortRequest(word))
    sender.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(word)]


def no_descriptor(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_mail_waits_for_a_descriptor(
    kind: Literal["ipc", "tcp"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "REST_SECONDS", 0.05)
    transport = ZmqTransport(
        Settings.of(transport=kind, runtime_dir=str(tmp_path), advertise_host="127.0.0.1").deployment
    )
    inbox, sender = transport.bind("a", SchedulerInbox), transport.outbox()
    with monkeypatch.context() as patch:
        patch.setattr(Spares, "make_room", no_descriptor)
        for name in ("one", "two"):
            sender.send(inbox.address, AbortRequest(name))
            sender.flush()
    await asyncio.sleep(0.1)
    sender.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("one"), AbortRequest("two")]
    sender.close()
    transport.close()


async def test_over_tcp_a_listener_without_a_descriptor_rests_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transport = ZmqTransport(DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path), advertise_host="127.0.0.1"))
    inbox, sender = transport.bind("a", SchedulerInbox), transport.outbox()
    port = int(inbox.address.rpartition(":")[2])
    with socket.socket() as client:
        client.setblocking(False)
        with full_table():
            client.connect_ex(("127.0.0.1", port))
            before = time.process_time()
            await asyncio.sleep(0.4)
            assert time.process_time() - before < 0.3, "nor does its thread spin"
    assert "accept_paused" in capsys.readouterr().out
    sender.send(inbox.address, AbortRequest("later"))
    sender.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 10) == [AbortRequest("later")]
    sender.close()
    transport.close()


def test_a_service_begins_with_as_many_descriptors_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(main: Coroutine[Any, Any, int]) -> int:
        main.close()
        return descriptors.limit()

    monkeypatch.setattr(process, "uvloop", SimpleNamespace(run=run))
    monkeypatch.setattr(process, "faulthandler", SimpleNamespace(enable=lambda: None))
    monkeypatch.setattr(process, "guard_standard_streams", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(512, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        assert process.run_actor(unborn, Settings()) > few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def unborn(transport: Transport, settings: Settings) -> Actor:
    raise AssertionError("no process is to be started")


def test_a_limit_is_always_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptors.limit() == descriptors.MOST
