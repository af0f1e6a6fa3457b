"""A scheduler's next life with a smaller number than the last: its members find it, it finds theirs, and all goes on.

As after a clock was set back, which numbers once came from, or after the file that counts lives was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from services.scheduler.actor import SchedulerActor
from services.scheduler.membership.lives import Lives
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.actor import LifePhase, MemberActor
from shared.actor.actor import Handlers
from shared.clocks.epochs import LIMIT, MAX_LEAP, SPAN, EpochFollower, life_of
from shared.config import Settings
from shared.errors import ProtocolError
from shared.messages import (
    FetchBlocks,
    HoldAdapters,
    MayLeave,
    OfferBlocks,
    PeerGone,
    Refused,
    ReportHoldings,
    Roster,
    ServeBlocks,
    ServiceName,
    StepPlan,
    Tick,
    WorkerCapacity,
    WorkerInbox,
)
from shared.transport import MemoryTransport

QUICK = Settings.of(heartbeat_interval=0.02, heartbeat_timeout=0.2, reconcile_interval=0.05)
CAPACITY = WorkerCapacity(64, 16, 8, 512, 1000, "tiny", "float32", "cpu")


class Worker(MemberActor):
    """Runs nothing; notes which links speak to it, and what it takes for a new scheduler."""

    service = ServiceName.WORKER
    inbox_union = WorkerInbox

    def __init__(self, network: MemoryTransport) -> None:
        super().__init__(network, QUICK)
        self.links: list[int] = []
        self.num_new = 0

    def handlers(self) -> Handlers:
        return {
            StepPlan: self.handle_work,
            ReportHoldings: self.handle_work,
            HoldAdapters: self.handle_work,
            OfferBlocks: self.handle_work,
            FetchBlocks: self.handle_work,
            ServeBlocks: self.handle_work,
            MayLeave: self.ignore,
            PeerGone: self.ignore,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def capacity(self) -> WorkerCapacity | None:
        return CAPACITY

    def handle_work(self, message: StepPlan | ReportHoldings | HoldAdapters) -> None:
        self.check_link(message.epoch)
        self.links.append(message.epoch)

    def ignore(self, _: MayLeave | PeerGone) -> None:
        """This worker leaves without a word."""

    def on_new_scheduler(self) -> None:
        self.num_new += 1


def life(number: int) -> Lives:
    """One that begins there, as if it had been counted."""
    lives = Lives()
    assert number == 1 or lives.pass_by(SPAN * (number - 1) + SPAN // 2)
    lives.former = []
    return lives


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Deployment:
    def __init__(self) -> None:
        self.network = MemoryTransport()
        self.scheduler: SchedulerActor
        self._running: dict[Any, asyncio.Task[None]] = {}

    def start(self, lives: Lives) -> None:
        self.scheduler = SchedulerActor(self.network, QUICK, Scheduler(Policy()), lives)
        self.run(self.scheduler)

    def run(self, actor: Any) -> None:
        self._running[actor] = asyncio.create_task(actor.run())

    async def kill(self, actor: Any) -> None:
        task = self._running.pop(actor)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self) -> None:
        for actor in list(self._running):
            await self.kill(actor)


@asynccontextmanager
async def deployment(number: int) -> AsyncIterator[tuple[Deployment, Worker]]:
    """A scheduler in the life of this number, and a worker that has heard a link of it."""
    one = Deployment()
    one.start(life(number))
    worker = Worker(one.network)
    one.run(worker)
    try:
        await until(lambda: worker.phase is LifePhase.READY and worker.links)
        yield one, worker
    finally:
        await one.end()


@pytest.mark.parametrize("number", [2, 700])
async def test_a_life_of_a_smaller_number_takes_a_greater_one(number: int) -> None:
    async with deployment(number) as (one, worker):
        before, num_links = worker.newest_epoch, len(worker.links)
        await one.kill(one.scheduler)
        with structlog.testing.capture_logs() as lines:
            one.start(Lives())
            assert one.scheduler.epoch < before
            await until(lambda: one.scheduler.membership.members and worker.roster.scheduler_epoch > before)
            await until(lambda: len(worker.links) > num_links)
        assert worker.links[-1] > before and worker.num_new == 1 and worker.phase is LifePhase.READY
        assert [line["member"] for line in lines if line["event"] == "epoch_raised"] == [worker.instance]


async def test_the_same_number_is_another_life() -> None:
    async with deployment(1) as (one, worker):
        await one.kill(one.scheduler)
        one.start(Lives())
        await until(lambda: one.scheduler.membership.members and worker.roster.scheduler_epoch == one.scheduler.epoch)
        num_links = len(worker.links)
        await until(lambda: len(worker.links) > num_links)
        assert worker.num_new == 1


async def test_members_of_a_life_that_takes_another_number_stay_with_it() -> None:
    """One that was there already sees no other life, and its link begins anew; one that knew better joins."""
    async with deployment(600) as (one, old):
        await one.kill(one.scheduler)
        message = old.heartbeat()
        await one.kill(old)
        one.start(Lives())
        young = Worker(one.network)
        one.run(young)
        await until(lambda: young.links)
        before = young.newest_epoch
        assert message.newest_epoch > before
        one.scheduler.handle_heartbeat(message)
        await until(lambda: young.roster.scheduler_epoch > message.newest_epoch)
        await until(lambda: young.links[-1] > message.newest_epoch)
        assert young.num_new == 0 and young.phase is LifePhase.READY


async def test_a_number_that_nobody_gave_out_is_outlived() -> None:
    """A forged one that came first: no scheduler can be beyond it, so it is believed until it has been silent."""
    network = MemoryTransport()
    one, worker = Deployment(), Worker(network)
    one.network = network
    one.run(worker)
    await asyncio.sleep(0)
    worker.post(Roster(LIMIT, 1, []))
    await until(lambda: worker.roster.scheduler_epoch == LIMIT)
    one.start(Lives())
    await until(lambda: worker.phase is LifePhase.READY and worker.links)
    assert life_of(worker.roster.scheduler_epoch) == 1 == life_of(worker.links[-1])
    await one.end()


async def test_a_scheduler_that_is_not_believed_keeps_nobody_s_health(capsys: pytest.CaptureFixture[str]) -> None:
    async with deployment(5) as (one, worker):
        await one.kill(one.scheduler)
        await until(lambda: not worker.scheduler_is_live)
        worker.handle_roster(Roster(3, 1, []))
        assert not worker.scheduler_is_live
        assert "old_roster" in capsys.readouterr().out, "and it is said"
        with pytest.raises(ProtocolError):
            worker.handle_roster(Roster(2 * MAX_LEAP, 1, []))
        with pytest.raises(ProtocolError):
            worker.check_link(3)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_known_one_is_believed_while_it_is_heard() -> None:
    clock = Clock()
    following = EpochFollower(2.5, clock)
    assert following.hear(40 * SPAN)
    for _ in range(20):
        clock.now += 1.0
        assert following.hear(40 * SPAN + 5) and not following.hear(3 * SPAN)
        assert not following.hear(2000 * SPAN)


def test_one_other_alone_is_believed_after_its_silence() -> None:
    clock = Clock()
    following = EpochFollower(2.5, clock)
    assert following.hear(40 * SPAN)
    for _ in range(3):
        clock.now += 1.0
        assert not following.hear(3 * SPAN)
    clock.now += 1.0
    assert not following.hear(7 * SPAN), "a third: a process that speaks once"
    assert not following.hear(3 * SPAN)
    clock.now += 2.5
    assert following.hear(3 * SPAN) and following.is_heard
    assert following.hear(40 * SPAN), "and the one before, should it be there again, at once"
