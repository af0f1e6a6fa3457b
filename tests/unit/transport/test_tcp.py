"""Across hosts: keys, the way to the scheduler, connections that are made anew."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import stat
from pathlib import Path

import pytest
import zmq

from shared.config import DeploymentSettings
from shared.errors import ConfigError, FatalError
from shared.messages import AbortRequest, SchedulerInbox, encode
from shared.transport import tcp
from shared.transport.keys import KeyFile, load_keys
from shared.transport.outbox import MAX_WATCHED
from shared.transport.way import Way
from shared.transport.zeromq import ZmqTransport


async def test_a_stranger_gets_no_frame_through(tmp_path: Path) -> None:
    settings = DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    inbox = transport.bind("a", SchedulerInbox)
    keys = load_keys(settings.runtime_path)
    context = zmq.Context()
    public, secret = zmq.curve_keypair()
    plain, stranger = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = keys.server_public, public, secret
    for socket in (plain, stranger):
        socket.connect(inbox.address)
        socket.send(encode(AbortRequest("evil")))
    friend = transport.outbox()
    friend.send(inbox.address, AbortRequest("good"))
    friend.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("good")]
    await asyncio.sleep(0.3)
    inbox.post(AbortRequest("last"))
    assert await inbox.recv_batch() == [AbortRequest("last")]
    for socket in (plain, stranger):
        socket.close(linger=0)
    context.term()
    friend.close()
    inbox.close()
    transport.close()


async def test_an_inbox_follows_its_host_to_another_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ZmqTransport(DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path / "run")))
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    before = inbox.address
    assert before.startswith("tcp://127.0.0.1:") and not inbox.readdress()
    monkeypatch.setattr(Way, "_look", lambda _: "")
    assert not inbox.readdress() and inbox.address == before, "a host that is cut off keeps its address"
    cut_off = inbox.is_cut_off
    assert cut_off
    monkeypatch.setattr(Way, "_look", lambda _: "127.0.0.2")
    assert inbox.readdress()
    assert not inbox.is_cut_off
    assert inbox.address == before.replace("127.0.0.1", "127.0.0.2") and not inbox.readdress()
    outbox.send(inbox.address, AbortRequest("there"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("there")]
    outbox.close()
    transport.close()


async def test_a_scheduler_s_name_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transport.way.NAME_SECONDS", 0.3)
    monkeypatch.setattr("shared.transport.way.NAME_POLL", 0.02)
    answers: list[str | OSError] = [OSError("not yet"), OSError("not yet"), "127.0.0.1"]

    def look_up(_: str) -> str:
        answer = answers.pop(0) if answers else OSError("never")
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("socket.gethostbyname", look_up)
    assert Way("scheduler").begin == "127.0.0.1" and not answers
    with pytest.raises(ConfigError, match="'scheduler' cannot be reached: never"):
        Way("scheduler")


async def test_a_connection_is_made_anew_where_nothing_is_acknowledged(tmp_path: Path) -> None:
    settings = DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    outbox = transport.outbox()
    outbox.send("tcp://127.0.0.1:9", AbortRequest("lost"))
    outbox.flush()
    (socket,) = outbox._sockets.values()
    patience = int(1000 * settings.heartbeat_timeout)
    assert (socket.getsockopt(zmq.TCP_MAXRT), socket.getsockopt(zmq.CONNECT_TIMEOUT)) == (patience, patience)
    outbox.forget("tcp://127.0.0.1:9")
    transport.close()


async def test_an_address_that_cannot_be_connected_to_leaves_nothing(tmp_path: Path) -> None:
    transport = ZmqTransport(
        DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    )
    outbox, gone = transport.outbox(), asyncio.Queue[str]()
    outbox.on_gone = gone.put_nowait
    outbox.send("tcp://127.0.0.1:99999", AbortRequest("1"))
    outbox.flush()
    for port in range(20000, 20000 + MAX_WATCHED + 10):
        outbox.send(f"tcp://127.0.0.1:{port}", AbortRequest("1"))
    outbox.flush()
    assert len(outbox._watches) == MAX_WATCHED
    outbox.close()
    transport.close()
    assert gone.empty(), "who was never reached has not left"


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    first = load_keys(tmp_path)
    assert load_keys(tmp_path) == first
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_keys_of_a_running_deployment_are_put_back(tmp_path: Path) -> None:
    now, directory = [100.0], tmp_path / "run"
    keys = load_keys(directory)
    scheduler, member = (KeyFile(directory, keys, clock=lambda: now[0]) for _ in range(2))
    scheduler.is_schedulers = True
    assert (scheduler.keep(), member.keep()) == ("", "")
    shutil.rmtree(directory)
    assert member.keep() == "its keys" and load_keys(directory) == keys
    shutil.rmtree(directory)
    others = load_keys(directory)  # of a process that started just then
    newcomer = KeyFile(directory, others, clock=lambda: now[0])
    assert member.keep() == "", "the scheduler sees to it"
    assert scheduler.keep() == "its keys" and load_keys(directory) == keys
    assert newcomer.keep() == ""
    now[0] += 6
    with pytest.raises(FatalError, match="other keys"):
        newcomer.keep()
    assert (scheduler.keep(), member.keep()) == ("", "")
    shutil.rmtree(directory)
    load_keys(directory)
    with pytest.raises(ConfigError, match="another deployment"):
        scheduler.keep()


async def test_whoever_speaks_over_tcp_keeps_the_keys_in_place(tmp_path: Path) -> None:
    transport = ZmqTransport(
        DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    )
    keys = load_keys(tmp_path / "run")
    assert transport.keep() == ""
    shutil.rmtree(tmp_path / "run")
    assert transport.keep() == "its keys" and load_keys(tmp_path / "run") == keys
    transport.close()


async def test_a_stranger_over_tcp_holds_a_descriptor_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_MS", 200)
    transport = ZmqTransport(DeploymentSettings(transport="tcp", runtime_dir=str(tmp_path), advertise_host="127.0.0.1"))
    inbox = transport.bind("a", SchedulerInbox)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(inbox.address.rpartition(":")[2]))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    transport.close()
