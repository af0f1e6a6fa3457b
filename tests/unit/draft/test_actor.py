"""The draft as an actor: what it says of itself, answers by way of either kind of turns, and what ends it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.draft.actor import DraftActor
from services.draft.main import make
from services.draft.ngram import PIECE
from services.draft.session import DraftSession
from shared.actor import LifePhase, executor
from shared.actor.executor import ThreadExecutor
from shared.config import Settings
from shared.errors import FatalError, ModelError
from shared.messages import (
    DraftCapacity,
    DraftProposals,
    DraftUpdate,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
    Roster,
    SchedulerInbox,
    ServiceName,
    Tick,
)
from shared.transport import MemoryTransport
from tests.unit.draft.samples import Counter, admitted, update

ROOT = Path(__file__).resolve().parents[3]
QUICK: dict[str, Any] = {"heartbeat_interval": 0.05}


class Bench:
    """A draft and the scheduler's inbox."""

    def __init__(self, **settings: Any) -> None:
        self.network = MemoryTransport()
        self.scheduler = self.network.bind("scheduler", SchedulerInbox)
        self.outbox = self.network.outbox()
        self.actor = make(self.network, Settings.of(**(QUICK | settings)))

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.outbox.send(self.actor.inbox.address, message)
        self.outbox.flush()

    def welcome(self) -> None:
        me = Member(ServiceName.DRAFT, self.actor.instance, self.actor.inbox.address, self.actor.epoch)
        self.send(Roster(1, 1, [me]))

    async def heard(self, kind: type[Message]) -> Any:
        """The next message of a kind; what comes before it is let pass."""
        async with asyncio.timeout(10):
            while True:
                for message in await self.scheduler.recv_batch():
                    if isinstance(message, kind):
                        return message


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(bench.actor.run())
    try:
        yield bench
    finally:
        bench.actor.stop()
        bench.welcome()
        await task


async def test_one_that_is_off_is_a_member_and_no_more() -> None:
    async with running(Bench(draft="off")) as bench:
        hello = await bench.heard(Hello)
        assert (hello.service, hello.draft, hello.worker) == (ServiceName.DRAFT, None, None)
        bench.welcome()
        await bench.heard(Heartbeat)
        assert bench.actor.phase is LifePhase.READY
        bench.actor.request_drain()
        await bench.heard(Goodbye)


async def test_prompt_lookup_answers() -> None:
    async with running(Bench(draft="ngram", max_num_seqs=3, max_model_len=64)) as bench:
        assert (await bench.heard(Hello)).draft == DraftCapacity(3, 64, 0, "ngram")
        bench.send(update(1, {0: (8, [2], 3)}, opened=[admitted(0, [1, 2, 3, 4, 5, 6, 7, 1])]))
        answer = await bench.heard(DraftProposals)
        assert (answer.update_id, answer.num_tokens, answer.draft_token_ids) == (1, [9], [3, 4, 5])
        assert answer.distributions == []


async def test_what_is_told_meanwhile_counts_before_the_rest_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup is on the event loop, which has the heartbeats: it must not wait for a text to be read."""
    monkeypatch.setattr(executor, "SLICE", 0.0)
    async with running(Bench(draft="ngram")) as bench:
        bench.send(update(1, {0: (2 * PIECE, [], 1)}, opened=[admitted(0, [1, 2] * PIECE)]))
        bench.send(update(2, {1: (5, [], 1)}, opened=[admitted(1, [1, 2, 3, 1, 2])], closed=[0]))
        answer = await bench.heard(DraftProposals)
        assert (answer.update_id, answer.draft_token_ids) == (2, [3])


async def test_an_update_that_makes_no_sense_costs_itself() -> None:
    async with running(Bench(draft="ngram")) as bench:
        bench.send(update(1, opened=[admitted(0, [1, 2, 3, 1, 2])]))
        bench.send(DraftUpdate(1, 2, [], [], [0], [5], [2], [9], [1]))
        bench.send(update(3, {0: (5, [], 1)}))
        assert (await bench.heard(DraftProposals)).lost_rows == [0]
        bench.send(update(4, {0: (5, [], 1)}, opened=[admitted(0, [1, 2, 3, 1, 2])]))
        assert (await bench.heard(DraftProposals)).draft_token_ids == [3]


async def test_a_model_that_is_not_there_ends_it() -> None:
    bench = Bench(draft="/no/such/directory")
    with pytest.raises(ExceptionGroup) as caught:
        await bench.actor.run()
    assert caught.group_contains(ModelError, match="/no/such/directory")


def with_thread(bench: Bench, proposer: Counter) -> Bench:
    """The same draft with another proposer, in a thread as a model is."""
    loop, old = asyncio.get_running_loop(), bench.actor
    old.inbox.close()

    def make_executor(proposer: Any, transport: Any) -> ThreadExecutor[DraftUpdate]:
        def wake() -> None:
            loop.call_soon_threadsafe(bench.actor.post, Tick())

        return ThreadExecutor(DraftSession(proposer), LoopTransport(transport, loop), name="drafting", on_failure=wake)

    bench.actor = DraftActor(bench.network, old.settings, lambda: proposer, make_executor)
    return bench


class LoopTransport:
    """The in-process network delivers on the event loop only; a thread's mail has to go by there."""

    scheduler_address = "memory://scheduler"

    def __init__(self, network: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._outbox = network.outbox()
        self._loop = loop

    def keep(self) -> str:
        return ""

    def outbox(self) -> Any:
        return self

    def bind(self, name: str, union: Any) -> Any:
        raise AssertionError("a thread has no inbox")

    def send(self, address: str, message: Message) -> None:
        self._loop.call_soon_threadsafe(self._outbox.send, address, message)

    def flush(self) -> None:
        self._loop.call_soon_threadsafe(self._outbox.flush)

    def forget(self, address: str) -> None:
        raise AssertionError("a draft talks to the scheduler only")

    def close(self) -> None:
        """The network's."""


class Gated(Counter):
    """Waits at every piece of work until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        self.arrived.release()
        assert self.gate.acquire(timeout=10)
        return super().propose(goals, rejection)


async def test_what_is_told_meanwhile_counts_before_the_next_piece_of_work() -> None:
    proposer = Gated()
    async with running(with_thread(Bench(draft="ngram"), proposer)) as bench:
        bench.send(update(1, {0: (1, [], 50)}, opened=[admitted(0, [10])]))
        await asyncio.to_thread(proposer.arrived.acquire)
        bench.send(update(2, {0: (1, [70], 50)}), update(3, {0: (2, [80], 2)}))
        while bench.actor.inbox._mail:  # both are handled while the first piece of work is being done
            await asyncio.sleep(0)
        proposer.gate.release(100)
        answer = await bench.heard(DraftProposals)
        assert (answer.update_id, answer.draft_token_ids) == (3, [81, 82])
        assert proposer.num_pieces == 3


class Broken(Counter):
    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        raise RuntimeError("device lost")


async def test_a_failure_of_the_thread_ends_the_process() -> None:
    bench = with_thread(Bench(draft="ngram"), Broken())
    task = asyncio.create_task(bench.actor.run())
    bench.send(update(1, {0: (1, [], 5)}, opened=[admitted(0, [10])]))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await task
    assert caught.group_contains(FatalError, match="device lost")


def test_prompt_lookup_loads_neither_torch_nor_numpy() -> None:
    program = """
import asyncio, sys
from services.draft.main import make
from shared.config import Settings
from shared.messages import DraftProposals, SchedulerInbox
from shared.transport import MemoryTransport
from tests.unit.draft.samples import admitted, update

async def main():
    network = MemoryTransport()
    inbox = network.bind("scheduler", SchedulerInbox)
    actor = make(network, Settings.of(draft="ngram"))
    task = asyncio.create_task(actor.run())
    outbox = network.outbox()
    outbox.send(actor.inbox.address, update(1, {0: (5, [], 1)}, opened=[admitted(0, [1, 2, 3, 1, 2])]))
    outbox.flush()
    while not any(isinstance(message, DraftProposals) for message in await inbox.recv_batch()):
        pass
    task.cancel()

asyncio.run(main())
sys.exit(bool({"torch", "numpy", "zmq"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
