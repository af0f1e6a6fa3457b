"""The scheduler's shell: messages in, messages out, over a transport in memory and with workers without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.scheduler.main import make
from shared.clocks.clock import steady_time
from shared.config import Settings
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    AddRequest,
    GatewayInbox,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Message,
    ReportHoldings,
    RequestHeader,
    RequestRejected,
    Roster,
    ServiceName,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerInbox,
    schema_hash,
)
from shared.messages.control import PeerGone
from shared.messages.inboxes import DetokenizerInbox
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.transport import Inbox, MemoryTransport
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity, next_token

UNIONS = {"w": WorkerInbox, "d": DetokenizerInbox, "g": GatewayInbox}
SERVICES = {"w": ServiceName.WORKER, "d": ServiceName.DETOKENIZER, "g": ServiceName.GATEWAY}
PROMPT = [1, 2, 3, 4, 5]


class Player:
    """A member that keeps what it gets; a worker answers its plans, unless it is `silent`."""

    def __init__(self, name: str, network: MemoryTransport, scheduler: Any) -> None:
        self.name = name
        self.inbox: Inbox[Any] = network.bind(name, UNIONS[name[0]])
        self.got: list[Message] = []
        self.is_silent = False
        self.worker = FakeWorker(capacity())
        self._scheduler = scheduler
        self._task = asyncio.create_task(self._read())

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.got if isinstance(message, kind)]

    async def _read(self) -> None:
        while True:
            for message in await self.inbox.recv_batch():
                self.got.append(message)
                takes = self.name[0] == "w" and not self.is_silent and not isinstance(message, Roster)
                if takes and (answer := self.worker.take(message)) is not None:
                    self._scheduler.post(answer)

    def say_hello(self, epoch: int = 1) -> None:
        service = SERVICES[self.name[0]]
        offer = self.worker.capacity if service is ServiceName.WORKER else None
        self._scheduler.post(Hello(service, self.name, self.inbox.address, epoch, schema_hash(), worker=offer))

    def stop(self) -> None:
        self._task.cancel()


class Stage:
    """A scheduler, and members by name: w... are workers, d... detokenizers, g... gateways."""

    def __init__(self, **settings: Any) -> None:
        self.network = MemoryTransport()
        values = {"heartbeat_interval": 0.02, "heartbeat_timeout": 30.0, "reconcile_interval": 60.0, **settings}
        self.scheduler = make(self.network, Settings.of(**values))
        self.players: dict[str, Player] = {}
        self.running = asyncio.create_task(self.scheduler.run())

    async def join(self, *names: str) -> None:
        for name in names:
            self.players[name] = Player(name, self.network, self.scheduler)
            self.players[name].say_hello()
        await self.until(lambda: set(names) <= self.members)

    @property
    def members(self) -> set[str]:
        return {member.instance for member in self.scheduler.membership.members}

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def ask(self, request_id: str, gateway: str = "g", **params: Any) -> None:
        values = {"max_tokens": 4, "seed": 7, "ignore_eos": True, **params}
        resolved = SamplingParams(**values).resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(request_id, self.players[gateway].inbox.address, deadline=steady_time() + 60)
        self.scheduler.post(AddRequest(header, resolved, pack_tokens(PROMPT), [0]))

    def output(self, request_id: str, detokenizer: str = "d") -> list[int]:
        batches = self.players[detokenizer].of(TokenBatch)
        told = (tokens for batch in batches for tokens in batch.sequences if tokens.request_id == request_id)
        return [token for tokens in told for token in tokens.token_ids]

    async def close(self) -> None:
        self.scheduler.request_drain()
        await self.running
        for player in self.players.values():
            player.stop()


def expected(count: int) -> list[int]:
    history = list(PROMPT)
    for _ in range(count):
        history.append(next_token(history, 7))
    return history[len(PROMPT) :]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    await made.join("w", "d", "g")
    yield made
    await made.close()


async def test_a_request_is_computed_and_its_tokens_go_to_the_detokenizer(stage: Stage) -> None:
    stage.ask("a")
    await stage.until(lambda: len(stage.output("a")) == 4)
    assert stage.output("a") == expected(4)


async def test_an_aborted_request_ends_and_gives_its_blocks_back(stage: Stage) -> None:
    stage.ask("a", max_tokens=100)
    await stage.until(lambda: stage.output("a"))
    stage.scheduler.post(AbortRequest("a"))
    await stage.until(lambda: not stage.scheduler.core.requests)
    (replica,) = stage.scheduler.core.replicas.values()
    await stage.until(lambda: replica.pool.num_available == replica.pool.size)


async def test_a_request_that_can_not_be_served_is_rejected_to_its_gateway(stage: Stage) -> None:
    stage.ask("long", max_tokens=4)
    header = RequestHeader("x", stage.players["g"].inbox.address)
    resolved = SamplingParams(max_tokens=4).resolved(GenerationDefaults(), max_tokens=16)
    stage.scheduler.post(AddRequest(header, resolved, pack_tokens([1] * 500), [0]))
    gateway = stage.players["g"]
    await stage.until(lambda: gateway.of(RequestRejected))
    (rejection,) = gateway.of(RequestRejected)
    assert rejection.request_id == "x" and rejection.code is RejectCode.INVALID_ARGUMENT
    await stage.until(lambda: len(stage.output("long")) == 4)


async def test_load_is_told(stage: Stage) -> None:
    stage.ask("a")
    await stage.until(lambda: len(stage.output("a")) == 4)
    gateway = stage.players["g"]
    stage.scheduler.post(GetLoad("q", gateway.inbox.address))
    await stage.until(lambda: gateway.of(Load))
    (load,) = gateway.of(Load)
    assert (load.request_id, load.num_finished, load.num_running, load.num_waiting) == ("q", 1, 0, 0)
    assert (load.num_prompt_tokens, load.num_output_tokens) == (len(PROMPT), 4)


async def test_a_worker_whose_process_ended_is_lost_and_another_goes_on(stage: Stage) -> None:
    stage.players["w"].is_silent = True
    stage.ask("a")
    await stage.until(lambda: stage.players["w"].of(StepPlan))
    stage.scheduler.post(PeerGone(stage.players["w"].inbox.address))
    await stage.until(lambda: "w" not in stage.members)
    assert not stage.scheduler.core.replicas
    await stage.join("w2")
    await stage.until(lambda: len(stage.output("a")) == 4)
    assert stage.output("a") == expected(4)


async def test_the_requests_of_a_gateway_that_left_are_aborted(stage: Stage) -> None:
    stage.ask("a", max_tokens=100)
    await stage.until(lambda: stage.output("a"))
    stage.scheduler.post(Goodbye(ServiceName.GATEWAY, "g", 1))
    await stage.until(lambda: not stage.scheduler.core.requests)
    assert stage.members == {"w", "d"}


async def test_an_answer_that_makes_no_sense_restarts_the_link(stage: Stage) -> None:
    worker = stage.players["w"]
    worker.is_silent = True
    stage.ask("a")
    await stage.until(lambda: worker.of(StepPlan))
    (plan, *_) = worker.of(StepPlan)
    worker.is_silent, worker.worker = False, FakeWorker(capacity())
    stage.scheduler.post(StepResult(plan.epoch, plan.step_id, num_sampled=[1, 1, 1], sampled_token_ids=[1, 2, 3]))
    await stage.until(lambda: len(stage.output("a")) == 4)
    assert stage.output("a") == expected(4)
    (replica,) = stage.scheduler.core.replicas.values()
    assert replica.epoch > plan.epoch


async def test_a_member_that_says_hello_again_gets_the_roster_and_keeps_its_place(stage: Stage) -> None:
    detokenizer = stage.players["d"]
    version, count = stage.scheduler.membership.version, len(detokenizer.of(Roster))
    detokenizer.say_hello()
    await stage.until(lambda: len(detokenizer.of(Roster)) > count)
    assert stage.scheduler.membership.version == version


async def test_a_heartbeat_of_an_unknown_member_is_answered_with_a_roster_without_it(stage: Stage) -> None:
    stranger = Player("d2", stage.network, stage.scheduler)
    stage.players["d2"] = stranger
    stage.scheduler.post(Heartbeat(ServiceName.DETOKENIZER, "d2", 1, address=stranger.inbox.address))
    await stage.until(lambda: stranger.of(Roster))
    assert "d2" not in {member.instance for member in stranger.of(Roster)[0].members}


async def test_a_silent_member_is_lost_and_one_that_speaks_stays() -> None:
    stage = Stage(heartbeat_timeout=0.2)
    await stage.join("d", "g")
    async with asyncio.timeout(10):
        while "d" in stage.members:
            stage.scheduler.post(Heartbeat(ServiceName.GATEWAY, "g", 1))
            await asyncio.sleep(0.01)
    assert stage.members == {"g"}
    await stage.close()


async def test_holdings_are_asked_for_at_every_interval() -> None:
    stage = Stage(reconcile_interval=0.05)
    await stage.join("w", "d", "g")
    stage.ask("a")
    await stage.until(lambda: len(stage.output("a")) == 4)
    worker = stage.players["w"]
    await stage.until(lambda: len(worker.of(ReportHoldings)) >= 2)
    (replica,) = stage.scheduler.core.replicas.values()
    assert not replica.running
    await stage.close()


async def test_every_message_of_a_batch_has_one_time(stage: Stage) -> None:
    before = stage.scheduler.now
    await asyncio.sleep(0.05)
    stage.ask("a")
    await stage.until(lambda: len(stage.output("a")) == 4)
    assert before < stage.scheduler.now <= steady_time()
    assert stage.scheduler.core.clock.now <= stage.scheduler.now
