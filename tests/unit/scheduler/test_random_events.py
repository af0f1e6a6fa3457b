"""A hundred thousand random events, every invariant checked after each, every output compared with its solo run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.policy import Policy
from shared.messages import StopMatched, StreamLost
from tests.unit.scheduler.world import World

EVENTS = 100_000
MOTIFS = [[(7 * i + j) % 50 for j in range(8)] for i in range(3)]  # prompts are made of these, in any order


class Storm:
    """One seeded stream of events against one core."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        policy = Policy(
            max_num_batched_tokens=self.random.choice([16, 24, 64]),
            long_prefill_token_threshold=self.random.choice([0, 10]),
            scheduling_policy=self.random.choice(["fcfs", "priority"]),
        )
        self.world = World(
            policy,
            workers=self.random.choice([1, 1, 2]),
            num_blocks=self.random.choice([16, 20, 40]),
            block_size=8,
            max_num_seqs=self.random.choice([4, 12]),
            max_model_len=112,
        )
        self.world.acknowledges = self.random.random() < 0.5
        self.num_added = 0
        self.cut: set[str] = set()  # requests that did not run to their end

    def event(self) -> None:
        kind = self.random.random()
        names = list(self.world.workers)
        if kind < 0.42 and names:
            self.world.plan(self.random.choice(names))
        elif kind < 0.84 and names:
            self.world.answer(self.random.choice(names))
        elif kind < 0.93:
            self.add()
        elif kind < 0.96:
            self.disturb()
        elif kind < 0.98:
            self.lost_stream()
        elif kind < 0.99:
            self.troupe(names)

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
        }
        if r.random() < 0.2:
            params["n"] = r.randrange(2, 4)
        if r.random() < 0.2:
            params |= {
                "stop_token_ids": [r.randrange(50) for _ in range(5)],
                "min_tokens": min(3, params["max_tokens"]),
            }
        salt = r.choice(["", "", "tenant"])
        self.world.add(f"r{self.num_added}", prompt, priority=r.randrange(3), salt=salt, **params)

    def disturb(self) -> None:
        requests = list(self.world.scheduler.requests)
        if requests:
            request_id = self.random.choice(requests)
            self.cut.add(request_id)
            if self.random.random() < 0.5:
                self.world.abort(request_id)
            else:
                self.world.scheduler.stop_matched(StopMatched(request_id, self.random.randrange(2), 1))
                self.world.after()

    def lost_stream(self) -> None:
        requests = list(self.world.scheduler.requests)
        if requests:
            self.world.scheduler.stream_lost(StreamLost(self.random.choice(requests), 0))
        else:
            self.world.scheduler.set_detokenizers(self.random.choice([["d0"], ["d1", "d2"], ["d2"]]))
        self.world.after()

    def troupe(self, names: list[str]) -> None:
        if names and self.random.random() < 0.5:
            self.world.lose(self.random.choice(names))
        elif len(names) < 3:
            self.world.join(f"w{self.world.epoch}")

    def settle(self) -> None:
        if not self.world.workers:
            self.world.join("last")
        self.world.run()
        self.world.acknowledges = True
        self.world.after()
        self.world.assert_idle()
        whole = [request_id for request_id, _ in self.world.finished if request_id not in self.cut]
        self.world.assert_outputs(*whole)
        every = {f"r{i}" for i in range(1, self.num_added + 1)}
        assert every == {request_id for request_id, _ in self.world.finished} | self.cut | set(self.world.rejected)


@pytest.mark.timeout(600)
def test_invariants_hold_through_a_hundred_thousand_events() -> None:
    num_events, seed = 0, 0
    seen = dict.fromkeys(("num_preemptions", "num_prefix_cache_hits", "num_chunked_prefills", "num_block_copies",
                          "num_worker_losses", "num_aborted"), 0)  # fmt: skip
    while num_events < EVENTS:
        storm = Storm(seed)
        for _ in range(4000):
            storm.event()
        storm.settle()
        for name in seen:
            seen[name] += getattr(storm.world.scheduler.counters, name)
        num_events += storm.world.num_events
        seed += 1
    assert all(seen.values()), f"the storm was too calm: {seen}"
