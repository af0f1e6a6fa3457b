"""A rough world with stores: blocks move, and moves are lost, late, doubled, corrupt, in part, or of a dead epoch.

Beside the scheduler stands a model of what each name stands for: what a store is given under a name must be that,
whichever process gives it.  What a worker reads, its fake pool checks slot by slot.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

from services.worker.blocks.block_desk import Arrived
from services.worker.blocks.mover import CORRUPT, DIFFERENT, MISSING, UNREACHABLE
from shared.messages import (
    BlocksMoved,
    DropBlocks,
    FetchBlocks,
    LookUpBlocks,
    OfferBlocks,
    StepPlan,
    StoreContents,
    WorkerCapacity,
)
from tests.unit.scheduler.worlds.fake_worker import BLOCK_BYTES, Content
from tests.unit.scheduler.worlds.rough_world import RoughWorld

SPACES = {size: bytes([size]) * 16 for size in (4, 8, 16, 32)}  # by block size


class FakeStore:
    """Keeps so many blocks, the least recently used of which go first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[bytes, Content] = OrderedDict()
        self.kept: list[bytes] = []
        self.dropped: list[bytes] = []
        self.asked: list[bytes] = []  # keys that it is to look for in the backend

    def keep(self, key: bytes, content: Content) -> None:
        self.blocks[key] = content
        self.blocks.move_to_end(key)
        self.kept.append(key)
        while len(self.blocks) > self.size:
            self.drop(next(iter(self.blocks)))

    def drop(self, key: bytes) -> None:
        del self.blocks[key]
        if key in self.kept:
            self.kept.remove(key)
        self.dropped.append(key)


class MovingWorld(RoughWorld):
    """`carry` is the mover of a worker, `tell` is a store's account; both take their time.  Workers serve their blocks,
    unless they are among the `selfish`; some leave in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stores: dict[str, FakeStore] = {}
        self.truth: dict[bytes, Content] = {}  # by key
        self.backend: dict[bytes, Content] = {}  # of all stores: what they were given, also by those that are gone
        self.seen: Counter[str] = Counter()
        self.selfish: set[str] = set()
        super().__init__(*args, **kwargs)

    # -- workers

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        super().join(name, size)
        if name not in self.selfish:
            self.scheduler.moves.serve(name)

    def lose(self, name: str) -> None:
        super().lose(name)
        self.scheduler.moves.leave(name)

    def leave(self, name: str) -> None:
        self.scheduler.handovers.leave(name)
        self.num_events += 1

    def let_leave(self) -> None:
        """Those that are told that they may."""
        for name in self.scheduler.handovers.take_released():
            assert name in self.workers, "a worker that is gone is told to leave"
            self.seen["left"] += 1
            self.scheduler.retire_worker(name)
            self.scheduler.moves.leave(name)
            del self.workers[name], self.plans[name], self.alive[name]
            self.after()

    # -- stores

    def join_store(self, name: str, size: int, *, can_look_up: bool = False) -> None:
        self.stores[name] = FakeStore(size)
        self.scheduler.moves.join(name, can_look_up=can_look_up)
        self.num_events += 1

    def lose_store(self, name: str) -> None:
        del self.stores[name]
        self.scheduler.moves.leave(name)
        self.num_events += 1

    def tell(self, name: str, chance: random.Random) -> None:
        """A store's account of what has changed, or of everything; now and then it is lost, or told twice."""
        store, kind = self.stores[name], chance.random()
        for key in store.asked:
            if key in self.backend:
                store.keep(key, self.backend[key])
                self.seen["found in the backend"] += 1
            else:
                store.dropped.append(key)
        store.asked.clear()
        is_first = kind < 0.1
        message = StoreContents(name, list(store.blocks) if is_first else store.kept, store.dropped, is_first)
        store.kept, store.dropped = [], []
        for _ in range(0 if kind > 0.95 else 2 if kind > 0.9 else 1):
            self.scheduler.moves.told(message)
        self.num_events += 1

    # -- orders

    def plan(self, name: str) -> StepPlan | None:
        plan = super().plan(name)
        for move in self.scheduler.replicas[name].moves.open.values():
            assert move.deadline > self.now, "a move is not over in time"
        self.send_orders()
        return plan

    def send_orders(self) -> None:
        for name, order in self.scheduler.moves.take_orders():
            assert not isinstance(order, DropBlocks), "a store that tells the truth is not believed"
            if isinstance(order, LookUpBlocks):
                self.stores[name].asked += order.keys
                continue
            self.links[name].append(order)
            self.seen[type(order).__name__] += 1
            self.seen["from workers"] += isinstance(order, FetchBlocks) and order.store in self.workers
            if isinstance(order, FetchBlocks) and not self.is_broken:
                for block, generation in zip(order.blocks, order.generations, strict=True):
                    life = order.epoch, 0, block, generation
                    assert life not in self.writers, "a block is fetched in a generation that has an owner"
                    self.writers.add(life)
        self.after()

    # -- the mover

    def carry(self, name: str, chance: random.Random) -> None:
        """Of one worker: a little of what it has to carry."""
        carrier = self.workers[name].carrier
        if carrier.given and chance.random() < 0.5:
            self._give(name, *carrier.given.pop(0), chance)
        elif carrier.wanted:
            place = chance.randrange(len(carrier.wanted))
            self._bring(name, *carrier.wanted.pop(place), chance)
        self.num_events += 1

    def _give(self, name: str, order: OfferBlocks, data: list[Content], chance: random.Random) -> None:
        store = self.stores.get(order.store)
        if chance.random() < 0.1:
            return  # the answer never comes
        if order.is_check:
            self._compare(name, order, data)
            return
        count = chance.randrange(len(data) + 1) if chance.random() < 0.1 else len(data)
        if store is None:
            count = 0
        for block_name, content in zip(order.names[:count], data, strict=False):
            assert None not in content, "a block is offered that is not full"
            key = SPACES[len(content)] + block_name
            assert self.truth.setdefault(key, content) == content, "a block is offered under another's name"
            if store is not None:
                store.keep(key, content)
                self.backend[key] = content
        reason = "" if count == len(order.names) else UNREACHABLE
        self.answers[name].append(BlocksMoved(order.epoch, order.move_id, count, count * BLOCK_BYTES, 0.01, reason))

    def _compare(self, name: str, order: OfferBlocks, data: list[Content]) -> None:
        blocks = self.stores[order.store].blocks if order.store in self.stores else {}
        found = blocks.get(SPACES[len(data[0])] + order.names[0])
        reason = MISSING if found is None else "" if found == data[0] else DIFFERENT
        self.seen[f"compared {reason}"] += 1
        self.answers[name].append(BlocksMoved(order.epoch, order.move_id, int(not reason), reason=reason))

    def _bring(self, name: str, order: FetchBlocks, count: int, chance: random.Random) -> None:
        """In one piece or in some, all or the first of them, soon or never."""
        kind = chance.random()
        self.seen["lost" if kind < 0.1 else "corrupt" if kind < 0.2 else "whole"] += 1
        if kind < 0.1:
            return
        space, names = SPACES[self.workers[name].capacity.block_size], order.names[:count]
        is_there = order.store in self.stores or order.store in self.workers
        found = self._stored(order.store, space, names) if is_there else []
        for block_name, content in zip(names, found, strict=False):
            assert self.truth.setdefault(space + block_name, content) == content, (
                "a block is found under another's name"
            )
        reason = "" if len(found) == len(order.names) else MISSING if is_there else UNREACHABLE
        if kind < 0.2:
            found, reason = found[: chance.randrange(len(found) + 1)], CORRUPT
        size, links = chance.choice([1, 1, 2, 8]), self.links[name]
        for start in range(0, max(1, len(found)), size):
            piece, is_last = found[start : start + size], start + size >= len(found)
            if not is_last and chance.random() < 0.3:
                continue
            num_bytes = (start + len(piece)) * BLOCK_BYTES
            links.append(Arrived(order, start, piece, is_last, num_bytes, 0.01, reason if is_last else ""))

    def _stored(self, source: str, space: bytes, names: list[bytes]) -> list[Content]:
        """What a store or a worker finds."""
        if source in self.workers:
            served: list[Content] = self.workers[source].desk.served.read(names)
            return served
        found: list[Content] = []
        for one in names:
            content = self.stores[source].blocks.get(space + one)
            if content is None:
                break
            found.append(content)
        return found

    # -- until everything is done

    def step(self) -> bool:
        busy = super().step()
        self.let_leave()
        self.send_orders()
        for name in list(self.workers):
            carrier = self.workers[name].carrier
            while carrier.given or carrier.wanted:
                self.carry(name, random.Random(self.num_events))
                busy = True
        return busy

    def assert_idle(self) -> None:
        """What is still on its way is given up in time."""
        self.now += 100.0
        for name in list(self.workers):
            self.plan(name)
        replicas = self.scheduler.replicas.values()
        assert not any(replica.moves.held for replica in replicas), "a move never ends"
        assert self.scheduler.moves.stores.lookups.deadline is None, "an answer is waited for without end"
        assert not any(replica.prefills for replica in replicas), "a request is on its way for ever"
        super().assert_idle()
