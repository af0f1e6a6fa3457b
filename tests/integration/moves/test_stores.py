"""With a store a token is what it is without: a successor fetches what a killed worker had computed, bit for bit."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from services.store.arena import BlockArena
from services.store.backends.blocks import BackendBlocks
from services.worker.blocks.block_desk import Arrived, BlockDesk
from services.worker.blocks.mover import BlockMover
from shared.data_link.addresses import ENDING, UNIX, listening_at
from shared.data_link.frames import checksum
from shared.data_link.server import BlockServer
from shared.messages import DropBlocks, LookUpBlocks, SchedulerInbox, StepPlan, StoreContents
from shared.transport import MemoryTransport
from tests.integration.engine import Engine, Output, ask

SECRET = b"s" * 32
SECONDS = 20.0  # that what is on its way may take on a busy machine
PREFIX = random.Random(1).choices(range(4, 4000), k=400)
ASKS = [
    ask([*PREFIX, 5, 6], temperature=0.0, logprobs=2),
    ask([*PREFIX[:300], 7], temperature=1.0, logprobs=1, seed=3, n=2),
    ask([*PREFIX[:170], 9, 9], temperature=0.8, top_p=0.9, repetition_penalty=1.2),
]


class MovingEngine(Engine):
    """With a store, behind a real data link.  Plans run at once, so orders to move come behind them by themselves."""

    def __init__(
        self,
        directory: Path,
        *,
        store_memory: int = 64 << 20,
        policy: Policy | None = None,
        backend: BackendBlocks | None = None,
        **settings: Any,
    ) -> None:
        path = directory / f"store{ENDING}"
        self.store = BlockArena(store_memory, backend=backend)
        self.server = BlockServer([listening_at(path)], SECRET, self.store)
        self._directory, self._address = directory, f"{UNIX}{path}"
        self._network = MemoryTransport()
        self._inbox: Any = self._network.bind("scheduler", SchedulerInbox)  # where movers answer
        self._arrived: dict[str, queue.SimpleQueue[Arrived]] = {}
        self._movers: dict[str, BlockMover] = {}
        self._desks: dict[str, BlockDesk] = {}
        self.dropped: list[str] = []  # stores that were told to forget everything
        super().__init__(policy or Policy(max_num_batched_tokens=256, verify_fetches=0), **settings)
        self.core.moves.join("store", can_look_up=backend is not None)

    def join(self, name: str, **settings: Any) -> None:
        super().join(name, **settings)
        blocks = self.runners[name].blocks
        assert blocks is not None, "its blocks can move"
        self._arrived[name] = queue.SimpleQueue()
        self._movers[name] = BlockMover(blocks, self._network, self._directory, self._arrived[name].put)
        self._desks[name] = BlockDesk(blocks, self._movers[name])

    def lose(self, name: str) -> None:
        super().lose(name)
        self._movers.pop(name).close()
        del self._desks[name]

    def _plan(self, name: str) -> StepPlan | None:
        """What is fetched comes in its own time: the engine's clock does not run ahead of it."""
        return self.core.schedule(name, self.now)

    def step(self) -> bool:
        busy = super().step()
        self.move()
        is_waiting = any(replica.moves.held for replica in self.core.replicas.values())
        if is_waiting and not busy:
            time.sleep(0.001)
        return busy or bool(self.core.requests)

    def move(self) -> None:
        """Orders out, answers in, as far as they have come."""
        for name, order in self.core.moves.take_orders():
            if isinstance(order, LookUpBlocks):
                self._look_up(order)
                continue
            if isinstance(order, DropBlocks):
                self.dropped.append(name)
                self.store.drop(self.store.keys())
                continue
            addressed = msgspec.structs.replace(order, address=self._address, secret=SECRET)
            self._hear(self._desks[name].take(addressed))
        for name, desk in self._desks.items():
            while not self._arrived[name].empty():
                self._hear(desk.take(self._arrived[name].get()))
        mail, self._inbox._mail = list(self._inbox._mail), type(self._inbox._mail)()
        self._hear(mail)
        self.core.moves.told(StoreContents("store", *self.store.take_changes()))

    def _look_up(self, order: LookUpBlocks) -> None:
        """However long it takes: the engine's clock stands still meanwhile."""
        self.store.look_up(order.keys)
        deadline = time.monotonic() + SECONDS
        while self.core.moves.stores.lookups.deadline is not None:
            assert time.monotonic() < deadline, "an answer takes too long"
            self.core.moves.told(StoreContents("store", *self.store.take_changes()))
            time.sleep(0.001)

    def _hear(self, answers: list[Any]) -> None:
        for answer in answers:
            self.core.moves.moved(answer)

    def catch_up(self) -> None:
        """Until everything that was computed is stored."""
        deadline = time.monotonic() + SECONDS
        replicas, is_taken = self.core.replicas.values(), self.core.moves.stores.place_for
        while any(one.moves.open or (one.pool.named and is_taken("")) for one in replicas):
            assert time.monotonic() < deadline, "an offer takes too long"
            self.move()
            time.sleep(0.001)

    def close(self) -> None:
        for mover in self._movers.values():
            mover.close()
        self.server.close()


@pytest.fixture
def engines() -> Iterator[list[MovingEngine]]:
    made: list[MovingEngine] = []
    yield made
    for engine in made:
        engine.close()


def said(outputs: list[list[Output]]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    return [[(one.token_ids, [msgspec.json.encode(some) for some in one.logprobs]) for one in some] for some in outputs]


def alone(settings: dict[str, Any]) -> list[Any]:
    return said([Engine(Policy(enable_prefix_caching=False), **settings).generate([one])[0] for one in ASKS])


FORMATS: dict[str, dict[str, Any]] = {
    "native float32": {"kernels": "native"},
    "native bfloat16, KV in int8": {"kernels": "native", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "torch, weights in int8": {"kernels": "torch", "quantization": "int8"},
}


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_a_successor_fetches_what_a_killed_worker_had_computed(
    settings: dict[str, Any], tmp_path: Path, engines: list[MovingEngine]
) -> None:
    engine = MovingEngine(tmp_path, **settings)
    engines.append(engine)
    wanted = alone(settings)
    assert said(engine.generate(ASKS)) == wanted
    engine.catch_up()
    num_stored = len(engine.store)
    assert num_stored >= len(PREFIX) // engine.settings.memory.block_size
    engine.lose("w0")
    engine.join("w1")
    before = engine.counters.num_prefix_cache_hits
    assert said(engine.generate(ASKS)) == wanted
    hits = engine.counters.num_prefix_cache_hits - before
    usable = sum(len(one.prompt) // 16 * 16 for one in ASKS)
    assert engine.core.moves.num_fetched_blocks * 16 >= 0.9 * (len(PREFIX) // 16 * 16), "fetched, not computed"
    assert hits >= 0.9 * usable
    engine.catch_up()


def test_a_store_that_forgets_and_one_that_lies_cost_a_miss(tmp_path: Path, engines: list[MovingEngine]) -> None:
    """A block with other bytes than its checksum says, in the middle of a prefix; then none at all."""
    engine = MovingEngine(tmp_path)
    engines.append(engine)
    wanted = alone({})
    assert said(engine.generate(ASKS)) == wanted
    engine.catch_up()
    keys = engine.store.keys()
    _, data = engine.store._blocks[keys[len(keys) // 2]]
    assert isinstance(data, bytearray)
    data[7] ^= 1
    engine.lose("w0")
    engine.join("w1")
    assert said(engine.generate(ASKS)) == wanted
    assert engine.core.moves.num_failed_moves
    engine.server.close()
    engine.lose("w1")
    engine.join("w2")
    num_fetched = engine.core.moves.num_fetched_blocks
    assert said(engine.generate(ASKS)) == wanted
    assert engine.core.moves.num_fetched_blocks == num_fetched


def test_a_store_that_lies_under_right_checksums_is_found_out_and_asked_no_more(
    tmp_path: Path, engines: list[MovingEngine]
) -> None:
    """Where every fetch is verified.  What was answered before it was found out may be wrong, and nothing after."""
    engine = MovingEngine(tmp_path, policy=Policy(max_num_batched_tokens=256, verify_fetches=1), kernels="native")
    engines.append(engine)
    wanted = alone({"kernels": "native"})
    assert said(engine.generate(ASKS)) == wanted
    engine.catch_up()
    engine.lose("w0")
    engine.join("w1")
    assert said(engine.generate(ASKS)) == wanted
    engine.catch_up()
    counts = engine.core.moves.counts
    assert counts.num_fetched_blocks
    assert counts.num_checks
    assert not counts.num_false_blocks, "it tells the truth"
    for key, (_, data) in engine.store._blocks.items():
        assert isinstance(data, bytearray)
        data[::5] = bytes(len(data[::5]))
        engine.store._blocks[key] = checksum(data), data
    engine.lose("w1")
    engine.join("w2")
    engine.generate(ASKS)
    engine.catch_up()
    counts = engine.core.moves.counts
    assert counts.num_false_blocks == 1
    assert any(alarm.event == "store_untrue" for alarm in engine.core.journal.take_alarms())
    assert engine.dropped == ["store"]
    engine.lose("w2")
    engine.join("w3")
    assert said(engine.generate(ASKS)) == wanted
    engine.catch_up()
    assert said(engine.generate(ASKS)) == wanted
    assert engine.core.moves.counts.num_fetched_blocks == counts.num_fetched_blocks
    assert not len(engine.store), "nothing is given to it any more"


def test_blocks_that_were_computed_otherwise_are_never_found() -> None:
    others = ({"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"block_size": 32}, {"kernels": "native"})
    kinds: tuple[dict[str, Any], ...] = ({}, *others)
    spaces = {Engine(**({"kernels": "torch"} | one)).runners["w0"].capacity.block_space for one in kinds}
    assert len(spaces) == len(kinds)
    assert b"" not in spaces
