"""Storms whose requests have adapters: a few more than a worker holds, loaded, dropped and unloaded meanwhile."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec

from shared.messages import (
    Adapter,
    AdapterFailure,
    AdaptersHeld,
    Hello,
    HoldAdapters,
    ServiceName,
    StepPlan,
    UnloadAdapter,
    WorkerCapacity,
)
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity
from tests.unit.scheduler.worlds.rough_world import RoughWorld
from tests.unit.scheduler.worlds.storm import Storm

ADAPTERS = [Adapter(name, digest=name * 8, path=f"/{name}") for name in ("one", "two", "three", "four")]
BROKEN = Adapter("broken", digest="broken", path="/broken")


class AdapterWorld(RoughWorld):
    """Orders go to workers and their answers come back in order, but whenever it suits each."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        self.max_loras, self.num_held = 1, 2
        self.orders: dict[str, deque[HoldAdapters]] = {}
        self.told: dict[str, deque[AdaptersHeld]] = {}
        self.unloads: set[str] = set()  # that were not answered yet
        self.most_running = 0
        super().__init__(*args, **limits)
        self.scheduler.adapters.learn(Hello(ServiceName.GATEWAY, "g0", "g0", 1, "", adapters=ADAPTERS))

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        self.orders[name], self.told[name] = deque(), deque()
        size = size or capacity(**self.limits)
        super().join(name, msgspec.structs.replace(size, max_loras=self.max_loras, num_held_loras=self.num_held))
        self.workers[name].adapter_epoch = self.epoch

    def lose(self, name: str) -> None:
        del self.orders[name], self.told[name]
        super().lose(name)

    def plan(self, name: str) -> StepPlan | None:
        plan = super().plan(name)
        running = {one.request.adapter for one in self.scheduler.replicas[name].running} - {""}
        assert len(running) <= self.max_loras, "more adapters in a step than may be"
        self.most_running = max(self.most_running, len(running))
        return plan

    def exchange(self, name: str, kind: float) -> None:
        """One of: orders are sent, a worker carries one out, its answer is heard."""
        if kind < 1 / 3:
            for instance, order in self.scheduler.adapters.take_orders():
                self.orders[instance].append(order)
            for _, answer in self.scheduler.adapters.take_answers():
                self.unloads.discard(answer.request_id)
        elif kind < 2 / 3 and self.orders[name]:
            self.told[name].append(self._hold(self.workers[name], self.orders[name].popleft()))
        elif self.told[name]:
            self.scheduler.adapters.held(self.told[name].popleft())
        self.after()

    def _hold(self, worker: FakeWorker, order: HoldAdapters) -> AdaptersHeld:
        held = [adapter for adapter in order.adapters if adapter != BROKEN]
        assert len(held) <= self.num_held, "more adapters than the worker has room for"
        worker.adapters, worker.adapter_epoch = {adapter.digest for adapter in held}, order.epoch
        failures = [AdapterFailure(adapter, "r 0") for adapter in order.adapters if adapter == BROKEN]
        return AdaptersHeld(order.epoch, order.order, held, failures)

    def unload(self, adapter: Adapter) -> None:
        """Its name is forgotten; requests that have it go on, and later ones bring its digest again."""
        if adapter.name in self.scheduler.adapters.known:
            self.unloads.add(f"u{self.num_events}")
            self.scheduler.adapters.unload(UnloadAdapter(f"u{self.num_events}", "g0", adapter.name))
            self.after()

    def step(self) -> bool:
        for name in list(self.workers):
            for kind in (0.0, 0.5, 1.0):
                self.exchange(name, kind)
        return super().step() or any(self.orders.values()) or any(self.told.values())

    def settle(self) -> None:
        super().settle()
        self.exchange(next(iter(self.workers)), 0.0)
        assert not self.unloads, "an unload waits, and no request has the adapter"


class AdapterStorm(Storm):
    world_kind = AdapterWorld
    world: AdapterWorld

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.turns = turns = random.Random(f"adapters {seed}")
        self.world.max_loras = turns.choice([1, 2])
        self.world.num_held = self.world.max_loras + turns.choice([0, 1])
        for name in list(self.world.workers):
            self.world.restart(name)

    def event(self) -> None:
        kind, world = self.turns.random(), self.world
        if kind < 0.15 and world.workers:
            world.exchange(self.turns.choice(list(world.workers)), self.turns.random())
        elif kind < 0.16:
            world.unload(self.turns.choice(ADAPTERS))
        else:
            super().event()

    def adapter(self) -> Adapter | None:
        kind = self.turns.random()
        if kind < 0.02:
            self.cut.add(f"r{self.num_added}")  # it is refused, once a worker has tried
            return BROKEN
        return None if kind < 0.3 else self.turns.choice(ADAPTERS)
