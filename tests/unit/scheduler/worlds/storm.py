"""Seeded streams of everything that can happen to a scheduler and its workers, one event at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.scheduler.state.policy import Policy
from shared.messages import Adapter, StopMatched, StreamLost, WorkerCapacity
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.rough_world import RoughWorld

MOTIFS = [[(7 * i + j) % 50 for j in range(8)] for i in range(3)]  # prompts are made of these, in any order
COUNTED = ("num_preemptions", "num_prefix_cache_hits", "num_chunked_prefills", "num_block_copies", "num_worker_losses",
           "num_aborted", "num_lost_steps", "num_accepted_tokens")  # fmt: skip
TAMPERED = ("num_refused_rows", "num_leaked_rows", "num_leaked_blocks")


class Storm:
    """Requests that come and go, workers and drafts that die and come back, links that lose and repeat.

    In half of the storms workers that come differ from those before them in the size and number of their blocks, and
    in their rows.  In kinds of their own workers have sliding pools too (`WindowStorm`), or keep states (`StateStorm`).
    """

    block_sizes: Sequence[int] = (4, 8, 16, 32)  # of workers that come
    world_kind: type[RoughWorld] = RoughWorld
    background_shares: Sequence[float] = (0.0, 0.2, 0.5, 0.8)  # of the requests
    reuses_parts = False  # of blocks

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.draws = draws = random.Random(f"background {seed}")  # of its own: the rest is as it would be without
        self.background_share = draws.choice(self.background_shares)
        policy = Policy(
            max_num_batched_tokens=r.choice([16, 24, 64]),
            long_prefill_token_threshold=r.choice([0, 10]),
            scheduling_policy=r.choice(["fcfs", "priority"]),
            num_draft_tokens=r.choice([0, 1, 4]),
            background_step_tokens=draws.choice([3, 8, 128]),
            enable_partial_block_hits=self.reuses_parts,
        )
        self.world = self.make_world(
            policy,
            workers=r.choice([1, 1, 2]),
            num_blocks=r.choice([16, 20, 40]),
            block_size=8,
            max_num_seqs=r.choice([4, 12]),
            max_model_len=112,
            sliding=self.windows(8),
            num_snapshots=self.num_snapshots(),
        )
        self.world.acknowledges = r.random() < 0.5
        self.num_added = 0
        self.cut: set[str] = set()  # requests that did not run to their end
        self.roughness = r.choice([0.0, 0.01, 0.04])  # faults of links among all events
        self.has_drafts = r.random() < 0.5
        self.has_mixed_workers = r.random() < 0.5

    def make_world(self, policy: Policy, **limits: Any) -> RoughWorld:
        return self.world_kind(policy, **limits)

    def windows(self, block_size: int) -> tuple[tuple[int, int], ...]:
        """Windows and numbers of blocks of a worker's sliding pools."""
        return ()

    def num_snapshots(self) -> int | None:
        """Of a worker's states; None: it keeps none."""
        return None

    def run(self, num_events: int) -> None:
        while self.world.num_events < num_events:
            self.event()
        self.settle()

    @property
    def seen(self) -> Counter[str]:
        """What happened, so that a storm that was too calm is noticed."""
        counters = self.world.scheduler.counters
        return Counter({name: getattr(counters, name) for name in (*COUNTED, *TAMPERED)})

    def event(self) -> None:
        world, kind = self.world, self.random.random()
        name = self.random.choice(list(world.workers)) if world.workers else ""
        if kind < 0.27 and name:
            world.plan(name)
        elif kind < 0.54 and name:
            world.work(name)
        elif kind < 0.81 and name:
            world.hear(name)
        elif kind < 0.88:
            self.add()
        elif kind < 0.94:
            self.rough(name)
        elif kind < 0.97 and self.has_drafts:
            self.draft()
        else:
            self.disturb(name)

    def rough(self, name: str) -> None:
        r, world = self.random, self.world
        if name and r.random() < 16 * self.roughness:
            world.disturb(name, r)
        elif r.random() < 0.3:
            world.deliver_late(r)
        elif name and r.random() < 0.5:
            world.ask(name)
        elif r.random() < 0.2:
            world.check_ledgers()

    def disturb(self, name: str) -> None:
        kind = self.random.random()
        if kind < 0.45:
            self.cut_short()
        elif kind < 0.8:
            self.lose_stream()
        elif kind < 0.9 and name:
            self.random.choice([self.world.lose, self.world.restart])(name)
        elif len(self.world.workers) < 3:
            self.world.join(f"w{self.world.epoch}", self.newcomer())

    def newcomer(self) -> WorkerCapacity | None:
        """What a worker that comes now offers: room for the longest sequence at least; None where all are alike."""
        if not self.has_mixed_workers:
            return None
        r, limits = self.random, self.world.limits
        block_size = r.choice(self.block_sizes)
        return capacity(
            num_blocks=r.choice([128, 160, 320]) // block_size,
            block_size=block_size,
            max_num_seqs=r.choice([3, limits["max_num_seqs"]]),
            max_model_len=limits["max_model_len"],
            sliding=self.windows(block_size),
            num_snapshots=self.num_snapshots(),
        )

    def add(self) -> None:
        if len(self.world.scheduler.requests) > 20:
            return
        self.num_added += 1
        r = self.random
        motifs = [token for _ in range(r.randrange(6)) for token in r.choice(MOTIFS)]
        prompt = motifs + [r.randrange(50) for _ in range(r.choice([0, 0, r.randrange(30)]))] or [1]
        params: dict[str, Any] = {
            "max_tokens": r.randrange(1, 40),
            "seed": r.randrange(1000),
            "ignore_eos": r.random() < 0.5,
            "speculate": r.random() < 0.9,
        }
        if r.random() < 0.2:
            params["n"] = r.randrange(2, 4)
        if r.random() < 0.2:
            params |= {
                "stop_token_ids": [r.randrange(50) for _ in range(5)],
                "min_tokens": min(3, params["max_tokens"]),
            }
        salt = r.choice(["", "", "tenant"])
        rests = self.draws.random() < self.background_share
        self.world.add(
            f"r{self.num_added}", prompt, priority=r.randrange(3), salt=salt, is_background=rests,
            adapter=self.adapter(), **params,
        )  # fmt: skip

    def adapter(self) -> Adapter | None:
        """Of the request that is added."""
        return None

    def cut_short(self) -> None:
        requests = list(self.world.scheduler.requests)
        if requests:
            request_id = self.random.choice(requests)
            self.cut.add(request_id)
            if self.random.random() < 0.5:
                self.world.abort(request_id)
            else:
                self.world.scheduler.stop_matched(StopMatched(request_id, self.random.randrange(2), 1))
                self.world.after()

    def lose_stream(self) -> None:
        requests = list(self.world.scheduler.requests)
        if requests:
            self.world.scheduler.stream_lost(StreamLost(self.random.choice(requests), 0))
        else:
            self.world.scheduler.set_detokenizers(self.random.choice([["d0"], ["d1", "d2"], ["d2"]]))
        self.world.after()

    def draft(self) -> None:
        world, r = self.world, self.random
        kind = r.random()
        if kind < 0.05 and world.drafts:
            world.lose_draft(r.choice(list(world.drafts)))
        elif kind < 0.2 and len(world.drafts) < 2:
            draft = FakeDraft(r.randrange(99), skill=r.random(), num_rows=r.choice([2, 16]), forgets=r.choice([0, 0.1]))
            world.join_draft(f"d{world.epoch}", draft)
        elif world.drafts:
            for name in list(world.drafts):
                world.propose(name)
        world.now += r.choice([0.0, 0.0, 1.0])

    def settle(self) -> None:
        world = self.world
        if not world.workers:
            world.join("last")
        world.settle()
        whole = [request_id for request_id, _ in world.finished if request_id not in self.cut]
        world.assert_outputs(*whole)
        every = {f"r{i}" for i in range(1, self.num_added + 1)}
        assert every == {request_id for request_id, _ in world.finished} | self.cut | set(world.rejected)


class WindowStorm(Storm):
    """Workers have layers that see a window only, of one size or of two, with blocks that are few or plenty."""

    def windows(self, block_size: int) -> tuple[tuple[int, int], ...]:
        r = self.random
        windows = r.choice([(1,), (5,), (16,), (24,), (8, 33)])
        return tuple((window, -(-window // block_size) + r.choice([2, 3, 8, 40])) for window in windows)


class TamperedStorm(Storm):
    """Ledgers go wrong too, and are set right: by the worker's fence, by its report, by the scheduler's own check."""

    def disturb(self, name: str) -> None:
        if name and self.random.random() < 0.3:
            self.world.tamper(name, self.random)
        elif self.random.random() < 0.3:
            self.world.check_ledgers()
        else:
            super().disturb(name)


class TamperedWindowStorm(TamperedStorm, WindowStorm):
    """Both."""


class StateStorm(Storm):
    """Workers keep states, and have few or many snapshots of them, or none; small blocks make more of them."""

    block_sizes = (4, 8)

    def num_snapshots(self) -> int | None:
        return self.random.choice([0, 1, 2, 5, 20])


class TamperedStateStorm(TamperedStorm, StateStorm):
    """Both."""
