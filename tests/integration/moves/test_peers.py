"""A token is what it is alone: where a worker has its blocks from another one, where a request goes over from a worker
that leaves, and where one worker computes prompts for others; also if any of them dies meanwhile."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from services.worker.blocks.block_desk import Arrived, BlockDesk
from services.worker.blocks.mover import BlockMover
from shared.data_link.addresses import ENDING, UNIX, listening_at
from shared.data_link.server import BlockServer
from shared.messages import DropBlocks, FetchBlocks, LookUpBlocks, SchedulerInbox, StepPlan, WorkerRole
from shared.transport import MemoryTransport
from tests.integration.engine import Engine, Output, ask

SECRET = b"s" * 32
PREFIX = random.Random(2).choices(range(4, 4000), k=400)
SIZE = 16  # of a block
ASKS = [
    ask([*PREFIX, 5, 6], temperature=0.0, logprobs=2, max_tokens=60),
    ask([*PREFIX[:300], 7], temperature=1.0, logprobs=1, seed=3, n=2, max_tokens=60),
    ask([*PREFIX[:170], 9, 9], temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_tokens=60),
]
STEPS_TO_GO_OVER = 60


class SharingEngine(Engine):
    """Workers with real data links; plans run at once, so orders to move come behind them by themselves."""

    def __init__(self, directory: Path, roles: dict[str, WorkerRole], **settings: Any) -> None:
        self._directory, self._roles = directory, roles
        self._network = MemoryTransport()
        self._inbox: Any = self._network.bind("scheduler", SchedulerInbox)  # where movers answer
        self._arrived: dict[str, queue.SimpleQueue[Arrived]] = {}
        self._movers: dict[str, BlockMover] = {}
        self._desks: dict[str, BlockDesk] = {}
        self._servers: dict[str, BlockServer] = {}
        super().__init__(Policy(max_num_batched_tokens=128), workers=0, **settings)
        for name in roles:
            self.join(name)

    def join(self, name: str, **settings: Any) -> None:
        super().join(name, **settings)
        runner = self.runners[name]
        runner.capacity = msgspec.structs.replace(runner.capacity, role=self._roles.get(name, WorkerRole.BOTH))
        self._epoch += 1
        self.core.add_worker(name, self._epoch, runner.capacity)
        assert runner.blocks is not None, "its blocks can move"
        self._arrived[name] = queue.SimpleQueue()
        self._movers[name] = BlockMover(runner.blocks, self._network, self._directory, self._arrived[name].put)
        desk = self._desks[name] = BlockDesk(runner.blocks, self._movers[name])
        self._servers[name] = BlockServer([listening_at(self._path(name))], SECRET, desk.served)
        self.core.moves.serve(name)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{ENDING}"

    def lose(self, name: str) -> None:
        self._part(name)
        super().lose(name)
        self.core.moves.leave(name)

    def _part(self, name: str) -> None:
        self._servers.pop(name).close()
        self._movers.pop(name).close()
        self._path(name).unlink()
        del self._desks[name]

    def retire(self) -> list[str]:
        """Those that may leave now."""
        released = self.core.handovers.take_released()
        for name in released:
            self._part(name)
            self.core.retire_worker(name)
            self.core.moves.leave(name)
            del self.runners[name]
        return released

    def _plan(self, name: str) -> StepPlan | None:
        """What is fetched comes in its own time: the engine's clock does not run ahead of it."""
        return self.core.schedule(name, self.now)

    def step(self) -> bool:
        busy = super().step()
        self.move()
        if not busy and any(replica.moves.held for replica in self.core.replicas.values()):
            time.sleep(0.001)
        return busy or bool(self.core.requests)

    def move(self) -> None:
        """Orders out, answers in, as far as they have come."""
        for name, order in self.core.moves.take_orders():
            assert not isinstance(order, DropBlocks | LookUpBlocks)
            if isinstance(order, FetchBlocks):
                address = f"{UNIX}{self._path(order.store)}"
                order = msgspec.structs.replace(order, address=address, secret=SECRET)
            self._hear(self._desks[name].take(order))
        for name, desk in self._desks.items():
            while not self._arrived[name].empty():
                self._hear(desk.take(self._arrived[name].get()))
        mail, self._inbox._mail = list(self._inbox._mail), type(self._inbox._mail)()
        self._hear(mail)

    def _hear(self, answers: list[Any]) -> None:
        for answer in answers:
            self.core.moves.moved(answer)

    def computed_by(self, name: str) -> int:
        """Tokens in the plans of a worker."""
        return sum(sum(plan.num_scheduled_tokens) for one, plan in self.plans if one == name)

    def close(self) -> None:
        for name in list(self._desks):
            self._part(name)


@pytest.fixture
def engines() -> Iterator[list[SharingEngine]]:
    made: list[SharingEngine] = []
    yield made
    for engine in made:
        engine.close()


def said(outputs: list[list[Output]]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    return [[(one.token_ids, [msgspec.json.encode(some) for some in one.logprobs]) for one in some] for some in outputs]


@cache
def alone(form: str) -> list[Any]:
    engine = Engine(Policy(enable_prefix_caching=False), **FORMS[form])
    return said([engine.generate([one])[0] for one in ASKS])


FORMS: dict[str, dict[str, Any]] = {
    "float32": {"kernels": "native"},
    "bfloat16, KV in int8": {"kernels": "native", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


def test_a_miss_at_one_worker_is_fetched_from_another(tmp_path: Path, engines: list[SharingEngine]) -> None:
    engine = SharingEngine(tmp_path, {"w0": WorkerRole.BOTH}, **FORMS["float32"])
    engines.append(engine)
    wanted = alone("float32")
    assert said(engine.generate(ASKS)) == wanted
    engine.join("w1")
    engine.core.moves.leaving.add("w0")  # all goes to the other one, which has nothing yet
    assert said(engine.generate(ASKS)) == wanted
    num_usable = (len(PREFIX) + 1) // SIZE
    assert engine.core.moves.num_fetched_blocks == num_usable
    assert engine.computed_by("w1") < len(PREFIX) + 3 * 60 + 4 * (SIZE + 2), "fetched, not computed"


@pytest.mark.parametrize("form", FORMS)
def test_requests_go_over_from_a_worker_that_leaves(form: str, tmp_path: Path, engines: list[SharingEngine]) -> None:
    """They are computed on there meanwhile; less than a block and a few tokens of each are computed again."""
    engine = SharingEngine(tmp_path, {"w0": WorkerRole.BOTH}, **FORMS[form])
    engines.append(engine)
    wanted = alone(form)
    ids = [engine.add(one) for one in ASKS]
    while min(len(one.token_ids) for one in engine.outputs.values() or [Output()]) < 12:
        engine.step()
    engine.join("w1")
    engine.core.handovers.leave("w0")
    num_steps = 0
    while not engine.retire():
        engine.step()
        num_steps += 1
        time.sleep(0.002)
        assert num_steps < STEPS_TO_GO_OVER, "the worker cannot leave"
    assert engine.core.requests, "they are not over yet"
    engine.run()
    assert said(engine.outputs_of(ids, ASKS)) == wanted
    admitted = [(plan, one.row) for name, plan in engine.plans if name == "w1" for one in plan.admitted]
    again = [plan.num_scheduled_tokens[plan.rows.index(row)] for plan, row in admitted]
    assert len(again) == 4 and max(again) <= SIZE + 16


APART = {"p": WorkerRole.PREFILL, "d0": WorkerRole.DECODE, "d1": WorkerRole.DECODE}


def test_one_worker_computes_prompts_and_others_go_on_with_them(tmp_path: Path, engines: list[SharingEngine]) -> None:
    engine = SharingEngine(tmp_path, APART, **FORMS["float32"])
    engines.append(engine)
    wanted = alone("float32")
    assert said(engine.generate(ASKS)) == wanted
    prompts = [plan for name, plan in engine.plans if name == "p"]
    assert sum(len(plan.admitted) for plan in prompts) == 1, "the others' prompts begin as the first one's"
    assert sum(sum(plan.num_scheduled_tokens) for plan in prompts) == len(PREFIX) // SIZE * SIZE
    most = max(max(plan.num_scheduled_tokens) for name, plan in engine.plans if name != "p")
    assert most <= SIZE + 1, "more than the end of a prompt is computed where it is decoded"


@pytest.mark.parametrize("victim", ["p", "d0"])
def test_whichever_dies_at_any_time_no_token_is_lost(victim: str, tmp_path: Path, engines: list[SharingEngine]) -> None:
    engine = SharingEngine(tmp_path, APART, **FORMS["float32"])
    engines.append(engine)
    asks, chance = [one for one in ASKS for _ in range(2)], random.Random(victim)
    wanted = [one for one in alone("float32") for _ in range(2)]
    ids = [engine.add(one) for one in asks]
    while engine.core.requests:
        engine.step()
        if victim not in engine.runners:
            if chance.random() < 0.2:
                engine.join(victim)
        elif engine.counters.num_worker_losses < 3 and chance.random() < 0.1:
            engine.lose(victim)
    assert said(engine.outputs_of(ids, asks)) == wanted
    assert engine.counters.num_worker_losses > 1
