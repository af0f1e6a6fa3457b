"""Unix sockets: frames cut anywhere, sockets that are full, destinations that come late, die and come back."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Settings
from shared.errors import ConfigError, ProtocolError
from shared.messages import AbortRequest, DecodeRequest, SchedulerInbox, TokenizerInbox, encode
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.transport.link import Inbox
from shared.transport.unix import Frames, UnixInbox, UnixOutbox, UnixTransport

MEGABYTE = b"x" * (1 << 20)


def wire(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_frames_are_the_same_however_they_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    data, frames, received = wire(sent), Frames(), []
    position = 0
    while position < len(data):
        step = cuts[position % len(cuts)]
        received += [bytes(frame) for frame in frames.feed(memoryview(data)[position : position + step])]
        position += step
    assert received == sent


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError):
        Frames().feed(memoryview((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")))


async def test_an_overlong_frame_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path)))
    inbox, friend = transport.bind("a", SchedulerInbox), transport.outbox()
    friend.send(inbox.address, AbortRequest("before"))
    friend.flush()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "a.sock"))
        stranger.sendall(b"\xff\xff\xff\xff")
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    friend.send(inbox.address, AbortRequest("after"))
    friend.flush()
    received: list[AbortRequest] = []
    while len(received) < 2:
        received += await asyncio.wait_for(inbox.recv_batch(), 5)
    assert [message.request_id for message in received] == ["before", "after"]
    friend.close()
    transport.close()


async def test_more_than_a_socket_holds_arrives_whole_and_in_order(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path)))
    inbox, outbox = transport.bind("a", TokenizerInbox), transport.outbox()
    for index in range(20):
        outbox.send(inbox.address, DecodeRequest(str(index), "g", MEGABYTE))
        outbox.flush()
    received: list[DecodeRequest] = []
    while len(received) < 20:
        received += await asyncio.wait_for(inbox.recv_batch(), 5)
    assert [message.request_id for message in received] == [str(index) for index in range(20)]
    assert all(message.token_ids == MEGABYTE for message in received)
    outbox.close()
    transport.close()


async def test_a_thread_without_a_loop_sends_more_than_a_socket_holds(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path)))
    inbox = transport.bind("a", TokenizerInbox)

    def send() -> None:
        outbox = transport.outbox()
        outbox.send(inbox.address, DecodeRequest("1", "g", 4 * MEGABYTE))
        outbox.flush()
        outbox.close()

    thread = threading.Thread(target=send)
    thread.start()
    (message,) = await asyncio.wait_for(inbox.recv_batch(), 5)
    assert message.token_ids == 4 * MEGABYTE
    await asyncio.to_thread(thread.join)
    transport.close()


async def test_mail_waits_for_a_destination_that_is_not_there_yet(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    outbox.send(f"ipc://{tmp_path}/late.sock", AbortRequest("patient"))
    outbox.flush()
    await asyncio.sleep(0.1)
    inbox = UnixInbox(tmp_path / "late.sock", SchedulerInbox)
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("patient")]
    outbox.close()
    inbox.close()


async def test_the_next_life_of_a_destination_gets_what_comes_after(tmp_path: Path) -> None:
    path, outbox = tmp_path / "a.sock", UnixOutbox(tmp_path)
    for life in ("first", "second", "third"):
        inbox = UnixInbox(path, SchedulerInbox)
        outbox.send(inbox.address, AbortRequest(life))
        outbox.flush()
        assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(life)]
        inbox.close()
    outbox.close()


async def test_what_was_sent_last_gets_out_before_the_end(tmp_path: Path) -> None:
    inbox, outbox = UnixInbox(tmp_path / "a.sock", TokenizerInbox), UnixOutbox(tmp_path)
    outbox.send(inbox.address, DecodeRequest("big", "g", MEGABYTE))
    closing = asyncio.create_task(asyncio.to_thread(outbox.close))
    (message,) = await asyncio.wait_for(inbox.recv_batch(), 5)
    assert message.request_id == "big"
    await closing
    inbox.close()


async def test_a_destination_that_is_forgotten_is_left_alone(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    address = f"ipc://{tmp_path}/never.sock"
    outbox.send(address, AbortRequest("lost"))
    outbox.flush()
    outbox.forget(address)
    inbox = UnixInbox(tmp_path / "never.sock", SchedulerInbox)
    outbox.send(address, AbortRequest("found"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("found")]
    outbox.close()
    inbox.close()


async def arrives(inbox: Inbox[Any], outbox: UnixOutbox, word: str) -> None:
    outbox.send(inbox.address, AbortRequest(word))
    outbox.flush()
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
    settings = Settings(runtime_dir=str(tmp_path / "run"))
    transport = UnixTransport(settings)
    inbox, old = transport.bind("scheduler", SchedulerInbox), transport.outbox()
    await arrives(inbox, old, "before")
    assert transport.keep() == ""
    harm(tmp_path / "run")
    await arrives(inbox, old, "meanwhile")
    assert transport.keep()
    assert transport.keep() == ""
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    await arrives(inbox, old, "after")
    new = UnixTransport(settings)
    newcomer = new.outbox()
    await arrives(inbox, newcomer, "new")
    with pytest.raises(ConfigError, match="a scheduler runs in"):
        new.bind("scheduler", SchedulerInbox)
    for outbox in (old, newcomer):
        outbox.close()
    new.close()
    transport.close()
    assert not (tmp_path / "run" / "scheduler.sock").exists()


async def test_who_waits_to_be_let_in_when_a_socket_is_made_anew_is_let_in(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path / "run")))
    inbox = transport.bind("worker-1", SchedulerInbox)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "run" / "worker-1.sock"))
        client.sendall(wire([encode(AbortRequest("waited"))]))
        delete(tmp_path / "run")
        assert transport.keep() == "its socket"
        assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("waited")]
    transport.close()


async def test_of_two_schedulers_the_one_without_the_lock_ends_and_leaves_the_other_alone(tmp_path: Path) -> None:
    settings = Settings(runtime_dir=str(tmp_path / "run"))
    first = UnixTransport(settings)
    first.bind("scheduler", SchedulerInbox)
    delete(tmp_path / "run")
    second = UnixTransport(settings)
    inbox, outbox = second.bind("scheduler", SchedulerInbox), second.outbox()
    with pytest.raises(ConfigError, match="a scheduler runs in"):
        first.keep()
    assert second.keep() == ""
    first.close()
    await arrives(inbox, outbox, "to the second")
    outbox.close()
    second.close()


async def test_a_directory_in_which_nothing_can_be_made_is_tried_again(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path / "run")))
    inbox, outbox = transport.bind("worker-1", SchedulerInbox), transport.outbox()
    await arrives(inbox, outbox, "before")
    delete(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the directory should be")
    for _ in range(2):
        with pytest.raises(OSError):
            transport.keep()
    await arrives(inbox, outbox, "connected")
    (tmp_path / "run").unlink()
    assert transport.keep() == "its socket"
    newcomer = transport.outbox()
    await arrives(inbox, newcomer, "new")
    for each in (outbox, newcomer):
        each.close()
    transport.close()
