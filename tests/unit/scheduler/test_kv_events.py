"""Events of the cache: who reads them knows what the pools hold, whatever happens, and nothing of salted prefixes.

PAGEANT_TEST_VLLM=DIR     a source tree of vLLM, by whose own classes the events are decoded; or vLLM is installed
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from services.scheduler.publishing.payloads import Form, encode_events, number_of
from services.scheduler.publishing.publisher import END, EventPublisher
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Sequence
from shared.errors import ConfigError
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_storm import MovingStorm
from tests.unit.scheduler.worlds.world import World

EVENTS = 800  # of a storm
VLLM = os.environ.get("PAGEANT_TEST_VLLM", "")


class Index:
    """What a router makes of the events: by rank, the numbers of blocks, with their tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, tuple[int | None, tuple[int, ...], str | None]]] = {}

    def read(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        blocks = self.blocks.setdefault(rank, {})
        for event in events:
            kind, *rest = event.values() if isinstance(event, dict) else event
            if kind == "AllBlocksCleared":
                blocks.clear()
            elif kind == "BlockRemoved":
                for number in rest[0]:
                    del blocks[number]
            else:
                numbers, parent, token_ids, size, _, medium, adapter = rest
                assert len(token_ids) == size * len(numbers)
                assert medium == "GPU"
                for place, number in enumerate(numbers):
                    assert number not in blocks, "it was told already"
                    blocks[number] = parent, tuple(token_ids[place * size : (place + 1) * size]), adapter
                    parent = number


def publish(world: World, index: Index, form: Form = "map") -> None:
    for rank, events in world.scheduler.events.take():
        index.read(encode_events(world.now, events, rank, form))


def test_the_index_of_a_reader_is_what_the_pools_hold_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are computed, evicted, fetched from stores, and lost with their workers."""
    salted: set[int] = set()
    hash_blocks = Sequence.hash_blocks

    def note(self: Sequence, block_size: int) -> list[bytes]:
        names = hash_blocks(self, block_size)
        if self.request.header.cache_salt:
            salted.update(map(number_of, names))
        return names

    monkeypatch.setattr(Sequence, "hash_blocks", note)
    kinds: list[tuple[int, Form]] = [(2, "map"), (10, "array"), (32, "map")]
    num_fetched = sum(stormy(seed, form, salted) for seed, form in kinds)
    assert salted
    assert num_fetched


def stormy(seed: int, form: Form, salted: set[int]) -> int:
    """Compare after each event of a storm; how many blocks were fetched."""
    storm, index, most = MovingStorm(seed), Index(), 0
    world, core = storm.world, storm.world.scheduler
    core.events.is_on = True
    for name in list(world.workers):  # those that came before begin again
        world.lose(name)
        world.join(name)
    while world.num_events < EVENTS:
        storm.event()
        publish(world, index, form)
        held = {rank: set(map(number_of, replica.pool.names)) - salted for replica, rank in ranks(world)}
        told = {rank: set(blocks) for rank, blocks in index.blocks.items() if blocks}
        assert told == {rank: numbers for rank, numbers in held.items() if numbers}
        most = max(most, *map(len, held.values()), 0)
    assert most > 5
    return core.moves.num_fetched_blocks


def ranks(world: World) -> Iterator[tuple[Any, int]]:
    return ((replica, rank) for replica, (rank, _) in world.scheduler.events._logs.items())


def test_events_name_tokens_parents_and_adapters() -> None:
    world, index = World(Policy(max_num_batched_tokens=64), workers=0), Index()
    world.scheduler.events.is_on = True
    world.join("w0", capacity(32, 8, 4, 112))
    prompt = [index % 40 for index in range(30)]
    world.add("r", prompt, max_tokens=4)
    world.add("secret", [*prompt[8:], 3], max_tokens=4, salt="tenant")
    while world.step():
        publish(world, index)
    blocks = list(index.blocks[0].values())
    numbers = list(index.blocks[0])
    assert [tokens for _, tokens, _ in blocks[:3]] == [tuple(prompt[i : i + 8]) for i in (0, 8, 16)]
    assert [parent for parent, _, _ in blocks[:3]] == [None, *numbers[:2]]
    assert {adapter for _, _, adapter in blocks} == {None}
    assert len(blocks) == 4, "nothing of the salted request"


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@here@model", num_kept=5)
    yield made
    made.close()


def asked(publisher: EventPublisher, first: int) -> list[tuple[bytes, int, bytes]]:
    """A replay from a number on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[bytes, int, bytes]] = []
        while True:
            _, topic, said, payload = socket.recv_multipart()
            if said == END:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(said, "big"), payload))


def test_a_subscriber_gets_events_in_order_and_those_that_it_missed(publisher: EventPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.subscribe("kv@")
        socket.connect(publisher.endpoint)
        heard: list[int] = []
        sent = 0
        while len(heard) < 3:  # it misses what is published before it is known
            publisher.publish(b"event %d" % sent)
            sent += 1
            if socket.poll(20):
                topic, said, payload = socket.recv_multipart()
                assert topic == b"kv@here@model"
                heard.append(int.from_bytes(said, "big"))
                assert payload == b"event %d" % heard[-1]
        assert heard == list(range(heard[0], heard[0] + 3))
    replayed = asked(publisher, sent - 2)
    assert [(number, payload) for _, number, payload in replayed] == [
        (number, b"event %d" % number) for number in range(sent - 2, sent)
    ]
    for number in range(sent, sent + 9):
        publisher.publish(b"event %d" % number)
    sent += 9
    while len(replayed := asked(publisher, 0)) < 5 or replayed[-1][1] < sent - 1:
        pass
    assert [number for _, number, _ in replayed] == list(range(sent - 5, sent)), "the last ones are kept"


def test_a_subscriber_that_does_not_read_for_a_while_misses_nothing() -> None:
    """Far more wait for it than sockets keep unless they are told to, and than the kernel's buffers take."""
    publisher = EventPublisher(f"ipc://@pageant-{os.getpid()}", "", "kv", num_kept=1)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger, socket.rcvtimeo, socket.rcvhwm = 0, 10_000, 1
        socket.subscribe("kv")
        socket.connect(publisher.endpoint)
        while not socket.poll(5):
            publisher.publish(b"is anybody there")
        for number in range(4000):
            publisher.publish(b"%4000d" % number)
        payloads = iter(lambda: socket.recv_multipart()[2], b"%4000d" % 3999)
        late = [int(payload) for payload in payloads if len(payload) == 4000]
    publisher.close()
    assert late == list(range(3999))


def test_a_whole_replay_waits_for_a_client_that_does_not_read_for_a_while() -> None:
    publisher = EventPublisher("tcp://127.0.0.1:*", f"ipc://@pageant-replay-{os.getpid()}", "kv", num_kept=4000)
    for number in range(4000):
        publisher.publish(b"%4000d" % number)
    while not asked(publisher, 3999):
        pass
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, context.socket(zmq.DEALER) as behind:
        socket.linger, socket.rcvtimeo, socket.rcvhwm = 0, 10_000, 1
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart([b"", bytes(8)])
        assert socket.poll(10_000)
        behind.linger, behind.rcvtimeo = 0, 10_000
        behind.connect(publisher.replay_endpoint)
        behind.send_multipart([b"", (3999).to_bytes(8, "big")])
        assert behind.recv_multipart()[3] == b"%4000d" % 3999, "it is answered behind the other one"
        found = [int(payload) for *_, payload in iter(socket.recv_multipart, [b"", b"", END, b""])]
    publisher.close()
    assert found == list(range(4000))


def test_a_publisher_that_is_closed_gives_its_endpoints_back() -> None:
    first = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv", num_kept=5)
    first.publish(b"event")
    first.close()
    second = EventPublisher(first.endpoint, first.replay_endpoint, "kv", num_kept=5)
    assert asked(second, 0) == [], "it numbers anew"
    with pytest.raises(ConfigError, match=f"kv_events_replay {second.replay_endpoint} cannot be bound"):
        EventPublisher("tcp://127.0.0.1:*", second.replay_endpoint, "kv", num_kept=5)
    second.close()


def test_one_endpoint_that_cannot_be_bound_leaves_the_other_free() -> None:
    taken = EventPublisher(f"ipc://@pageant-taken-{os.getpid()}", "", "kv", num_kept=1)
    free = f"ipc://@pageant-free-{os.getpid()}"
    with pytest.raises(ConfigError) as refused:
        EventPublisher(free, taken.endpoint, "kv", num_kept=1)
    EventPublisher(free, "", "kv", num_kept=1).close()
    assert refused.tb is not None, "until here it keeps what was made"
    taken.close()


def vllm_events(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's own module of events; of a source tree it is loaded alone, beside stand-ins for what it imports."""
    if not VLLM:
        return importlib.import_module("vllm.distributed.kv_events")
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), lambda *args: None
        ),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    file = Path(VLLM) / "vllm" / "distributed" / "kv_events.py"
    spec = importlib.util.spec_from_file_location("vllm_kv_events", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    not VLLM and importlib.util.find_spec("vllm") is None, reason="vLLM is not here, nor is PAGEANT_TEST_VLLM given"
)
def test_vllm_s_own_classes_read_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = vllm_events(monkeypatch)
    world = World(Policy(max_num_batched_tokens=64), workers=0)
    world.scheduler.events.is_on = True
    world.join("w0", capacity(12, 8, 4, 112))
    chance = random.Random(1)
    read: list[Any] = []
    for number in range(6):
        world.add(f"r{number}", chance.choices(range(40), k=40), max_tokens=4)
        while world.step():
            for rank, events in world.scheduler.events.take():
                payload = encode_events(1.5, events, rank, "map")
                read.append(msgspec.msgpack.decode(payload, type=theirs.KVEventBatch))
    world.lose("w0")
    for rank, events in world.scheduler.events.take():
        read.append(msgspec.msgpack.decode(encode_events(2.5, events, rank, "map"), type=theirs.KVEventBatch))
    assert {batch.data_parallel_rank for batch in read} == {0}
    found: list[Any] = [event for batch in read for event in batch.events]
    kinds: dict[Any, list[Any]] = {kind: [event for event in found if type(event) is kind] for kind in map(type, found)}
    assert set(kinds) == {theirs.BlockStored, theirs.BlockRemoved, theirs.AllBlocksCleared}
    assert all(len(one.token_ids) == 8 * len(one.block_hashes) for one in kinds[theirs.BlockStored])
    assert all(one.medium == theirs.MEDIUM_GPU for one in kinds[theirs.BlockRemoved])
