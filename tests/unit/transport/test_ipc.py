"""On one host: the private directory, and destinations that come late, end and come back."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import DeploymentSettings, Settings
from shared.errors import ConfigError
from shared.messages import AbortRequest, DecodeRequest, SchedulerInbox, TokenizerInbox
from shared.transport import Inbox, Outbox, outbox, zeromq
from shared.transport.zeromq import ZmqTransport

MEGABYTE = b"x" * (1 << 20)


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[ZmqTransport]:
    made = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    yield made
    made.close()


async def test_sockets_lie_in_a_private_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(run)))
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    transport.close()


async def test_a_runtime_dir_that_is_too_long_says_so(tmp_path: Path) -> None:
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path / ("x" * 90))))
    with pytest.raises(ConfigError, match="too long"):
        transport.bind("scheduler", SchedulerInbox)
    transport.close()


async def test_a_deployment_has_one_scheduler(tmp_path: Path) -> None:
    settings = Settings.of(runtime_dir=str(tmp_path))
    first, second = ZmqTransport(settings.deployment), ZmqTransport(settings.deployment)
    first.bind("scheduler", SchedulerInbox)
    with pytest.raises(ConfigError, match="runtime_dir of its own"):
        second.bind("scheduler", SchedulerInbox)
    first.close()
    second.bind("scheduler", SchedulerInbox)
    second.close()


async def test_an_instance_s_socket_file_goes_with_it(tmp_path: Path) -> None:
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    inbox = transport.bind("worker-1", SchedulerInbox)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-1.sock"]
    inbox.close()
    assert not list(tmp_path.iterdir())
    transport.close()


async def test_what_waits_where_no_process_ever_listens_is_dropped(
    transport: ZmqTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(outbox, "REST_SECONDS", 0.01)
    inbox, sender = transport.bind("a", SchedulerInbox), transport.outbox()
    await arrives(inbox, sender, "one")
    sender.send(f"ipc://{tmp_path}/never.sock", AbortRequest("lost"))
    async with asyncio.timeout(5):
        while sender.destinations != [inbox.address]:
            sender.flush()
            await asyncio.sleep(0.02)
    await arrives(inbox, sender, "two")
    sender.close()


async def test_an_overlong_message_costs_its_sender_the_connection_and_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "MAX_MESSAGE_BYTES", len(MEGABYTE))
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    inbox, friend, stranger = transport.bind("a", TokenizerInbox), transport.outbox(), transport.outbox()
    stranger.send(inbox.address, DecodeRequest("too long", "g", MEGABYTE))
    stranger.flush()
    for word in ("before", "after"):
        await arrives(inbox, friend, word)
    await arrives(inbox, stranger, "short")
    friend.close()
    stranger.close()
    transport.close()


async def test_more_than_a_socket_holds_arrives_whole_and_in_order(transport: ZmqTransport) -> None:
    inbox, sender = transport.bind("a", TokenizerInbox), transport.outbox()
    for index in range(20):
        sender.send(inbox.address, DecodeRequest(str(index), "g", MEGABYTE))
        sender.flush()
    received: list[DecodeRequest] = []
    while len(received) < 20:
        received += await asyncio.wait_for(inbox.recv_batch(), 5)
    assert [message.request_id for message in received] == [str(index) for index in range(20)]
    assert all(message.token_ids == MEGABYTE for message in received)
    sender.close()


async def test_a_thread_without_a_loop_sends_more_than_a_socket_holds(transport: ZmqTransport) -> None:
    inbox = transport.bind("a", TokenizerInbox)

    def send() -> None:
        sender = transport.outbox()
        sender.send(inbox.address, DecodeRequest("1", "g", 4 * MEGABYTE))
        sender.flush()
        sender.close()

    thread = threading.Thread(target=send)
    thread.start()
    (message,) = await asyncio.wait_for(inbox.recv_batch(), 5)
    assert message.token_ids == 4 * MEGABYTE
    await asyncio.to_thread(thread.join)


async def test_mail_waits_for_a_destination_that_is_not_there_yet(transport: ZmqTransport, tmp_path: Path) -> None:
    sender = transport.outbox()
    sender.send(f"ipc://{tmp_path}/late.sock", AbortRequest("patient"))
    sender.flush()
    await asyncio.sleep(0.1)
    inbox = transport.bind("late", SchedulerInbox)
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("patient")]
    sender.close()


async def test_a_socket_file_of_an_earlier_life_is_replaced_for_the_scheduler(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "scheduler.sock"))
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path)))
    inbox, sender = transport.bind("scheduler", SchedulerInbox), transport.outbox()
    await arrives(inbox, sender, "one")
    sender.close()
    transport.close()


async def test_the_next_life_of_a_destination_gets_what_comes_after(transport: ZmqTransport) -> None:
    sender = transport.outbox()
    for life in ("first", "second", "third"):
        inbox = transport.bind("a", SchedulerInbox)
        sender.send(inbox.address, AbortRequest(life))
        sender.flush()
        assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(life)]
        inbox.close()
        await asyncio.sleep(0.1)  # what is sent before the end is seen is lost with the connection
    sender.close()


async def test_what_was_sent_last_gets_out_before_the_end(tmp_path: Path) -> None:
    settings = Settings.of(runtime_dir=str(tmp_path))
    receiver, leaver = ZmqTransport(settings.deployment), ZmqTransport(settings.deployment)
    inbox, sender = receiver.bind("a", TokenizerInbox), leaver.outbox()
    sender.send(inbox.address, DecodeRequest("big", "g", MEGABYTE))
    sender.close()
    await asyncio.to_thread(leaver.close)
    (message,) = await asyncio.wait_for(inbox.recv_batch(), 5)
    assert message.request_id == "big"
    receiver.close()


async def test_a_destination_that_is_forgotten_is_left_alone(transport: ZmqTransport, tmp_path: Path) -> None:
    sender = transport.outbox()
    address = f"ipc://{tmp_path}/never.sock"
    sender.send(address, AbortRequest("lost"))
    sender.flush()
    sender.forget(address)
    await asyncio.sleep(0.1)  # ZeroMQ closes the socket in a thread
    inbox = transport.bind("never", SchedulerInbox)
    await arrives(inbox, sender, "found")
    sender.close()


async def arrives(inbox: Inbox[Any], sender: Outbox, word: str) -> None:
    sender.send(inbox.address, AbortRequest(word))
    sender.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(word)]


def delete(directory: Path) -> None:
    shutil.rmtree(directory)


def replace(directory: Path) -> None:
    directory.rename(directory.with_name("old"))
    directory.mkdir(mode=0o755)


def copy(directory: Path) -> None:
    """As a restored backup: files of the same names that are not those that are held."""
    directory.rename(directory.with_name("old"))
    directory.mkdir()
    (directory / "scheduler.lock").touch()
    socket.socket(socket.AF_UNIX).bind(str(directory / "scheduler.sock"))


def take_socket(directory: Path) -> None:
    (directory / "scheduler.sock").unlink()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("harm", [delete, replace, copy, take_socket])
async def test_a_directory_that_was_deleted_or_replaced_is_made_anew(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    """Who was connected stays so, newcomers find it, and a second scheduler is refused."""
    settings = Settings.of(runtime_dir=str(tmp_path / "run"))
    transport = ZmqTransport(settings.deployment)
    inbox, old = transport.bind("scheduler", SchedulerInbox), transport.outbox()
    await arrives(inbox, old, "before")
    assert transport.keep() == ""
    harm(tmp_path / "run")
    await arrives(inbox, old, "meanwhile")
    assert transport.keep()
    assert transport.keep() == ""
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    await arrives(inbox, old, "after")
    new = ZmqTransport(settings.deployment)
    newcomer = new.outbox()
    await arrives(inbox, newcomer, "new")
    with pytest.raises(ConfigError, match="a scheduler runs in"):
        new.bind("scheduler", SchedulerInbox)
    for sender in (old, newcomer):
        sender.close()
    new.close()
    transport.close()
    assert not (tmp_path / "run" / "scheduler.sock").exists()


async def test_who_waits_to_be_let_in_when_a_socket_is_made_anew_is_let_in(tmp_path: Path) -> None:
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path / "run")))
    transport.bind("worker-1", SchedulerInbox)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(tmp_path / "run" / "worker-1.sock"))
        delete(tmp_path / "run")
        assert transport.keep() == "its socket"
        assert client.recv(1), "ZeroMQ greets"
    transport.close()


async def test_of_two_schedulers_the_one_without_the_lock_ends_and_leaves_the_other_alone(tmp_path: Path) -> None:
    settings = Settings.of(runtime_dir=str(tmp_path / "run"))
    first = ZmqTransport(settings.deployment)
    first.bind("scheduler", SchedulerInbox)
    delete(tmp_path / "run")
    second = ZmqTransport(settings.deployment)
    inbox, sender = second.bind("scheduler", SchedulerInbox), second.outbox()
    with pytest.raises(ConfigError, match="a scheduler runs in"):
        first.keep()
    assert second.keep() == ""
    first.close()
    await arrives(inbox, sender, "to the second")
    sender.close()
    second.close()


async def test_a_directory_in_which_nothing_can_be_made_is_tried_again(tmp_path: Path) -> None:
    transport = ZmqTransport(DeploymentSettings(runtime_dir=str(tmp_path / "run")))
    inbox, sender = transport.bind("worker-1", SchedulerInbox), transport.outbox()
    await arrives(inbox, sender, "before")
    delete(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the directory should be")
    for _ in range(2):
        with pytest.raises(OSError):
            transport.keep()
    await arrives(inbox, sender, "connected")
    (tmp_path / "run").unlink()
    assert transport.keep() == "its socket"
    newcomer = transport.outbox()
    await arrives(inbox, newcomer, "new")
    for each in (sender, newcomer):
        each.close()
    transport.close()


async def test_a_scheduler_that_ends_leaves_its_successor_s_socket_alone(tmp_path: Path) -> None:
    settings = Settings.of(runtime_dir=str(tmp_path / "run"))
    first, second = ZmqTransport(settings.deployment), ZmqTransport(settings.deployment)
    first.bind("scheduler", SchedulerInbox)
    delete(tmp_path / "run")
    (tmp_path / "run").mkdir()
    inbox, sender = second.bind("scheduler", SchedulerInbox), second.outbox()
    await asyncio.to_thread(first.close)
    await arrives(inbox, sender, "to the second")
    sender.close()
    second.close()
