"""Storms over a deployment with stores, which come and go too, and in which blocks move all the time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from shared.messages import WorkerCapacity, WorkerRole
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_world import SPACES, MovingWorld
from tests.unit.scheduler.worlds.storm import Storm

MOVED = ("num_stored_blocks", "num_fetched_blocks", "num_failed_moves")


class MovingStorm(Storm):
    """Pools are small, so that blocks are evicted soon and come back from stores; workers of other block sizes share a
    store with these, and none of their blocks.  Workers fetch from each other too, some have roles, and some leave in
    order."""

    world: MovingWorld
    background_shares = (0.0, 0.0, 0.3)

    def make_world(self, policy: Any, **limits: Any) -> MovingWorld:
        policy = replace(policy, verify_fetches=self.random.choice([2, 8]))
        self.has_roles = self.random.random() < 0.5
        world = MovingWorld(policy, block_space=SPACES[8], role=self.role(), **limits)
        world.join_store("s0", self.random.choice([20, 200]))
        return world

    def role(self) -> WorkerRole:
        return self.random.choice(list(WorkerRole)) if self.has_roles else WorkerRole.BOTH

    def newcomer(self) -> WorkerCapacity | None:
        size = super().newcomer() or capacity(**self.world.limits)
        limits = size.num_blocks, size.block_size, size.max_num_seqs, size.max_model_len
        space = SPACES[size.block_size] if self.random.random() < 0.9 else b""
        return capacity(*limits, block_space=space, role=self.role())

    def event(self) -> None:
        world, kind = self.world, self.random.random()
        world.let_leave()
        if kind < 0.75:
            super().event()
        elif kind < 0.9 and world.workers:
            world.carry(self.random.choice(list(world.workers)), self.random)
        elif kind < 0.95 and world.stores:
            world.tell(self.random.choice(list(world.stores)), self.random)
        elif kind < 0.98:
            world.now += self.random.choice([0.1, 1.0, 3.0])
        elif kind < 0.99:
            self.change_workers()
        else:
            self.change_stores()

    def change_stores(self) -> None:
        world, r = self.world, self.random
        kind = r.random()
        if kind < 0.3 and world.stores:
            world.lose_store(r.choice(list(world.stores)))
        elif kind < 0.6 and world.stores:
            store = world.stores[r.choice(list(world.stores))]
            for key in r.sample(list(store.blocks), len(store.blocks) // 2):
                store.drop(key)
        elif len(world.stores) < 2:
            name, size = f"s{world.num_events}", r.choice([20, 200])
            world.join_store(name, size, can_look_up=world.num_events % 2 == 0)

    def change_workers(self) -> None:
        world, r = self.world, self.random
        if world.workers and r.random() < 0.6:
            world.leave(r.choice(list(world.workers)))
        elif len(world.workers) < 3:
            name = f"w{world.epoch}"
            if r.random() < 0.2:
                world.selfish.add(name)
            world.join(name, self.newcomer())

    def settle(self) -> None:
        self.world.let_leave()
        if not self.world.workers.keys() - self.world.scheduler.moves.leaving:
            self.world.join("last")
        super().settle()

    @property
    def seen(self) -> Counter[str]:
        moves = self.world.scheduler.moves
        moved = Counter({name: getattr(moves, name) for name in MOVED})
        moved["num_handed_over"] = self.world.scheduler.handovers.num_handed_over
        return super().seen + moved + self.world.seen
