"""Who has a line to a destination is told at once when nobody listens there any more, and never otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.messages import AbortRequest, SchedulerInbox
from shared.transport.unix import UnixInbox, UnixOutbox


def listening(outbox: UnixOutbox) -> asyncio.Queue[str]:
    gone: asyncio.Queue[str] = asyncio.Queue()
    outbox.on_gone = gone.put_nowait
    return gone


async def deliver(outbox: UnixOutbox, inbox: UnixInbox, word: str) -> None:
    outbox.send(inbox.address, AbortRequest(word))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest(word)]


async def test_an_idle_line_tells_of_the_end(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    gone = listening(outbox)
    inbox, other = UnixInbox(tmp_path / "a.sock", SchedulerInbox), UnixInbox(tmp_path / "b.sock", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    await deliver(outbox, other, "two")
    await asyncio.sleep(0.05)
    assert gone.empty()
    inbox.close()
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    await deliver(outbox, other, "three")
    assert gone.empty()
    outbox.close()
    other.close()


async def test_a_send_into_a_closed_line_tells_of_it_once(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    gone = listening(outbox)
    inbox = UnixInbox(tmp_path / "a.sock", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    inbox.close()
    outbox.send(inbox.address, AbortRequest("late"))
    outbox.flush()  # before the event loop has seen the end
    assert await asyncio.wait_for(gone.get(), 5) == inbox.address
    await asyncio.sleep(0.2)
    assert gone.empty()
    outbox.close()


async def test_a_line_that_only_broke_is_mended_without_a_word(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    gone = listening(outbox)
    inbox = UnixInbox(tmp_path / "a.sock", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    for connection in list(inbox._connections):
        inbox._drop(connection)
    await asyncio.sleep(0.05)
    await deliver(outbox, inbox, "two")
    assert gone.empty()
    outbox.close()
    inbox.close()


async def test_nobody_is_told_of_who_was_not_there_yet_or_was_forgotten(tmp_path: Path) -> None:
    outbox = UnixOutbox(tmp_path)
    gone = listening(outbox)
    outbox.send(f"ipc://{tmp_path}/late.sock", AbortRequest("patient"))
    outbox.flush()
    inbox = UnixInbox(tmp_path / "a.sock", SchedulerInbox)
    await deliver(outbox, inbox, "one")
    outbox.forget(inbox.address)
    inbox.close()
    await asyncio.sleep(0.2)
    assert gone.empty()
    outbox.close()
