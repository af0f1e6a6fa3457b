"""The run loop: order, failures, drains; and the roster's protocol between a member and its scheduler."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.main import make as make_scheduler
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.actor.status import read_status, write_status
from shared.config import Settings
from shared.errors import ConfigError, FatalError, ProtocolError
from shared.messages import (
    AbortRequest,
    DetokenizerInbox,
    Hello,
    Member,
    Refused,
    Roster,
    SchedulerInbox,
    ServiceName,
    Tick,
    TokenBatch,
    schema_hash,
)
from shared.transport import MemoryTransport

QUICK = Settings.of(heartbeat_interval=0.02, heartbeat_timeout=0.2)


class Echo(MemberActor):
    """Keeps what it gets; fails when told to."""

    service = ServiceName.DETOKENIZER
    inbox_union = DetokenizerInbox

    def __init__(self, transport: MemoryTransport, settings: Settings = QUICK) -> None:
        super().__init__(transport, settings)
        self.got: list[TokenBatch] = []
        self.failure: Exception | None = None

    def handlers(self) -> Handlers:
        return {
            TokenBatch: self.handle_tokens,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def handle_tokens(self, batch: TokenBatch) -> None:
        self.got.append(batch)
        if self.failure is not None:
            raise self.failure


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_missing_handler_is_a_start_up_error() -> None:
    class Deaf(Echo):
        def handlers(self) -> Handlers:
            return {Tick: self.handle_tick}

    with pytest.raises(FatalError, match=r"Refused.*Roster.*TokenBatch"):
        await Deaf(MemoryTransport()).run()


async def test_a_protocol_error_costs_one_message() -> None:
    actor = Echo(MemoryTransport())
    running = asyncio.create_task(actor.run())
    actor.failure = ProtocolError("nonsense")
    actor.post(TokenBatch([], []))
    actor.post(TokenBatch([], []))
    await until(lambda: len(actor.got) == 2)
    actor.request_drain()
    await running


async def test_any_other_error_is_fatal_and_says_which_message() -> None:
    actor = Echo(MemoryTransport())
    actor.failure = ZeroDivisionError("oops")
    actor.post(TokenBatch([], []))
    with pytest.raises(ExceptionGroup) as caught:
        await actor.run()
    assert caught.group_contains(FatalError, match="TokenBatch could not be handled.*oops")


async def test_background_work_that_fails_ends_the_actor() -> None:
    class Fragile(Echo):
        async def on_start(self) -> None:
            async def fail() -> None:
                raise FatalError("in the background")

            self.spawn(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await Fragile(MemoryTransport()).run()
    assert caught.group_contains(FatalError, match="in the background")


async def test_members_join_are_told_and_leave() -> None:
    network = MemoryTransport()
    scheduler, one, two = make_scheduler(network, QUICK), Echo(network), Echo(network)
    tasks = [asyncio.create_task(actor.run()) for actor in (scheduler, one, two)]
    await until(lambda: len(one.roster.members) == len(two.roster.members) == 2)
    two.request_drain()
    await tasks[2]
    await until(lambda: [member.instance for member in one.roster.members] == [one.instance])
    one.request_drain()
    scheduler.request_drain()
    await asyncio.gather(*tasks)


async def test_a_silent_member_is_struck_off_and_finds_its_way_back() -> None:
    network = MemoryTransport()
    scheduler, member = make_scheduler(network, QUICK), Echo(network)
    tasks = [asyncio.create_task(actor.run()) for actor in (scheduler, member)]
    await until(lambda: scheduler.membership.members)
    member._table[Tick] = lambda _: None
    await until(lambda: not scheduler.membership.members)
    member._table[Tick] = lambda message: MemberActor.handle_tick(member, message)
    await until(lambda: scheduler.membership.members)
    for actor in (member, scheduler):
        actor.request_drain()
    await asyncio.gather(*tasks)


async def test_who_is_reached_elsewhere_comes_again_as_another_life() -> None:
    network = MemoryTransport()
    scheduler, member = make_scheduler(network, QUICK), Echo(network)
    tasks = [asyncio.create_task(actor.run()) for actor in (scheduler, member)]
    await until(lambda: scheduler.membership.members)
    (before,) = scheduler.membership.members
    forgotten: list[str] = []
    member.on_forgotten = lambda: forgotten.append(member.inbox.address)  # type: ignore[method-assign]
    moves = iter([True])

    def readdress() -> bool:
        if not next(moves, False):
            return False
        network.inboxes["memory://elsewhere"] = network.inboxes.pop(member.inbox.address)
        member.inbox.address = "memory://elsewhere"
        return True

    member.inbox.readdress = readdress  # type: ignore[method-assign]
    await until(lambda: [one.address for one in scheduler.membership.members] == ["memory://elsewhere"])
    (after,) = scheduler.membership.members
    assert after.instance == before.instance and after.epoch > before.epoch
    await until(lambda: member.roster.members == [after])
    assert forgotten == ["memory://elsewhere"]
    for actor in (member, scheduler):
        actor.request_drain()
    await asyncio.gather(*tasks)


async def test_a_new_scheduler_is_found_at_the_next_heartbeat() -> None:
    network = MemoryTransport()
    first, member = make_scheduler(network, QUICK), Echo(network)
    tasks = [asyncio.create_task(actor.run()) for actor in (first, member)]
    await until(lambda: first.membership.members)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    second = make_scheduler(network, QUICK)
    tasks[0] = asyncio.create_task(second.run())
    await until(lambda: second.membership.members)
    assert member.roster.scheduler_epoch == second.epoch
    for actor in (member, second):
        actor.request_drain()
    await asyncio.gather(*tasks)


async def test_mixed_versions_refuse_each_other() -> None:
    network = MemoryTransport()
    scheduler, member = make_scheduler(network, QUICK), Echo(network)
    running = asyncio.create_task(scheduler.run())
    scheduler.post(Hello(ServiceName.DETOKENIZER, "old", member.inbox.address, 1, "another schema"))
    await until(lambda: member.inbox._mail)
    (refusal,) = [message for message in await member.inbox.recv_batch() if isinstance(message, Refused)]
    assert "mixed versions" in refusal.reason
    assert not scheduler.membership.members
    with pytest.raises(ConfigError, match="mixed versions"):
        member.handle_refused(Refused(member.instance, refusal.reason))
    scheduler.request_drain()
    await running


async def test_mail_to_an_actor_that_is_gone_is_lost_without_harm() -> None:
    network = MemoryTransport()
    outbox = network.outbox()
    outbox.send("memory://nobody", AbortRequest("r"))
    outbox.flush()
    inbox = network.bind("somebody", SchedulerInbox)
    outbox.send(inbox.address, AbortRequest("r"))
    outbox.flush()
    assert await inbox.recv_batch() == [AbortRequest("r")]


def test_a_member_is_one_life_of_an_instance() -> None:
    hello = Hello(ServiceName.WORKER, "w", "a", 1, schema_hash())
    assert Member(hello.service, hello.instance, hello.address, 1) != Member(hello.service, "w", "a", 2)


async def test_the_status_file_is_renewed_while_the_loop_turns(tmp_path: Path) -> None:
    status = tmp_path / "status"
    network = MemoryTransport()
    settings = QUICK.replace(status_file=str(status))
    scheduler = make_scheduler(network, settings)
    running = asyncio.create_task(scheduler.run())
    await until(status.exists)
    assert read_status(status) == "READY"
    before = status.stat().st_mtime_ns
    await until(lambda: status.stat().st_mtime_ns > before)
    scheduler.request_drain()
    await running
    write_status(QUICK.deployment, "READY")  # nothing is configured: nothing is written


async def test_a_status_is_in_its_file_as_soon_as_a_process_has_joined(tmp_path: Path) -> None:
    """A supervisor waits for it: the next tick would be half a second of each start."""
    network = MemoryTransport()
    slow = Settings.of(heartbeat_interval=60, heartbeat_timeout=120, stall_timeout=120)
    files = [tmp_path / "scheduler", tmp_path / "member"]
    scheduler = make_scheduler(network, slow.replace(status_file=str(files[0])))
    member = Echo(network, slow.replace(status_file=str(files[1])))
    tasks = [asyncio.create_task(actor.run()) for actor in (scheduler, member)]
    await until(lambda: all(read_status(file) == "READY" for file in files))
    for actor, task in zip((member, scheduler), reversed(tasks), strict=True):
        actor.request_drain()
        await task


def test_a_status_is_written_over_the_one_before_and_the_file_never_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that become free may cost the message loop its time: see `write_status`."""
    status = tmp_path / "status"
    settings = QUICK.replace(status_file=str(status))
    assert read_status(status) == ""
    write_status(settings.deployment, "NOT_SERVING")
    opened, really = [], os.open

    def watched(path: Any, flags: int, mode: int = 0o777) -> int:
        opened.append(flags)
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", watched)
    size = status.stat().st_size
    for word in ("READY", "STALLED", "DRAINING"):
        write_status(settings.deployment, word)
        assert read_status(status) == word and status.stat().st_size == size
    assert len(opened) == 3 and not any(flags & os.O_TRUNC for flags in opened)
