"""What the core remembers is bounded, however many tenants and requests there were."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from services.cli.bench.messages import DETOKENIZER, WORKER
from services.scheduler.lifecycle.finalizer import ACKNOWLEDGE_SECONDS
from services.scheduler.lifecycle.parking import MAX_PARKED, PARKED_SECONDS
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.fairness import MAX_TENANTS, Shares
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Request, Sequence
from services.scheduler.telemetry.prefix_misses import PER_BLOCK
from shared.messages import (
    HAS_EVERYTHING,
    AddRequest,
    LatencyBreakdown,
    RequestHeader,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.tracing.phases import NUM_PHASES
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.world import World

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 64, 512, 16
TENANTS = 10_000
GATEWAY = "ipc:///run/pageant/gateway.sock"


class Crowd:
    """Requests of many tenants at one worker, which answers every plan at once with tokens that end nothing."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.core = Scheduler(policy or Policy())
        self.core.add_worker(
            WORKER, 1, WorkerCapacity(NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, 512, 1000, "m", "float32", "cpu")
        )
        self.core.set_detokenizers([DETOKENIZER])
        self.now = 1.0
        self._num_asked = 0

    def ask(self, *, max_tokens: int = 2, is_kept: bool = False, n: int = 1) -> str:
        """A request of a tenant, with a name and a prompt of its own."""
        number = self._num_asked
        self._num_asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=number, ignore_eos=True, n=n)
        header = RequestHeader(
            f"{number:032x}", GATEWAY, tenant=f"tenant-{number}", cache_salt=f"{number}", is_kept=is_kept
        )
        prompt = pack_tokens([1 + (number + place) % 900 for place in range(20)])
        resolved = params.resolved(GenerationDefaults(), max_tokens=16)
        self.core.add(AddRequest(header, resolved, prompt, [0], latency=LatencyBreakdown([0] * NUM_PHASES)), self.now)
        return header.request_id

    def step(self) -> list[str]:
        """One plan and its answer; returns the requests that finished."""
        self.now += 0.01
        plan = self.core.schedule(WORKER, self.now)
        if plan is not None:
            self.core.apply(WORKER, self._answer(plan), self.now)
        batches = self.core.outbound.take_batches().values()
        self.core.outbound.take_rejections()
        self.core.journal.take()
        return [told.request_id for batch in batches for told in batch.sequences if told.finish_reason is not None]

    def _answer(self, plan: StepPlan) -> StepResult:
        counts = self.core.replicas[WORKER].in_flight[0].num_samples
        return StepResult(plan.epoch, plan.step_id, list(counts), [7] * sum(counts))

    def until_done(self) -> None:
        """Every request to its end, with its gateway's word that its client has everything."""
        while self.core.requests:
            for request_id in self.step():
                self.core.abort(request_id, has_everything=True)

    def largest(self) -> int:
        """Of all that can be reached from the core, the most entries of one container; descriptors of blocks and rows
        aside, which are made once."""
        found: dict[int, Any] = {}
        todo = [value for name, value in vars(self.core).items() if name != "policy"]
        while todo:
            item = todo.pop()
            if id(item) not in found and not isinstance(item, type | FunctionType | ModuleType):
                found[id(item)] = item
                todo += gc.get_referents(item)
        sizes = (len(item) for item in found.values() if isinstance(item, list | dict | set | deque))
        return max(size for size in sizes if size not in (NUM_BLOCKS, NUM_BLOCKS + 1))


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive() -> int:
    """Requests and sequences in this process, garbage that waits for a collection included."""
    return sum(type(item) in (Request, Sequence) for item in gc.get_objects())


def test_ten_thousand_tenants_leave_no_container_that_grew_with_them() -> None:
    crowd = Crowd()
    for number in range(TENANTS):
        crowd.ask()
        if number % (2 * NUM_ROWS) == 0:
            crowd.until_done()
            crowd.core.expire(crowd.now)
    crowd.until_done()
    crowd.core.expire(crowd.now)
    assert len(crowd.core.misses._seen) <= PER_BLOCK * NUM_BLOCKS
    assert crowd.core.shares.num_tenants <= MAX_TENANTS
    assert len(crowd.core._batchers[WORKER]._visitors) <= NUM_ROWS
    assert crowd.largest() <= MAX_TENANTS


def test_no_more_visitors_are_remembered_than_there_are_rows() -> None:
    crowd = Crowd()
    for _ in range(4 * NUM_ROWS):
        crowd.ask()
    crowd.until_done()
    crowd.ask()
    crowd.step()
    assert 0 < len(crowd.core._batchers[WORKER]._visitors) <= NUM_ROWS


def test_what_is_over_is_freed_without_a_collection() -> None:
    """Whether it came to its last token, was aborted in the queue or while it ran, or was never acknowledged."""
    crowd = Crowd()
    with without_collections():
        before = alive()
        for number in range(200):
            request_id = crowd.ask(max_tokens=4, n=1 + number % 3)
            if number % 4 == 1:
                crowd.core.abort(request_id)
            crowd.step()
            if number % 4 == 2:
                crowd.core.abort(request_id)
        while crowd.core.requests:
            crowd.step()
        assert crowd.core.finished, "these wait for their gateways' word"
        crowd.core.expire(crowd.now)
        crowd.core.expire(crowd.now + ACKNOWLEDGE_SECONDS + 1)
        for _ in range(3):
            crowd.step()
        assert alive() == before


def test_what_is_put_aside_is_freed_when_its_time_is_over_or_there_is_too_much_of_it() -> None:
    crowd = Crowd()
    with without_collections():
        before = alive()
        for _ in range(MAX_PARKED + 50):
            crowd.core.abort(crowd.ask(is_kept=True))
        assert alive() - before <= 2 * MAX_PARKED
        crowd.core.expire(crowd.now)
        crowd.core.expire(crowd.now + PARKED_SECONDS + 1)
        assert alive() == before


def test_a_word_of_what_is_over_frees_nothing_twice() -> None:
    crowd = Crowd()
    request_id = crowd.ask(is_kept=True)
    while not crowd.step():
        pass
    assert crowd.core.abort(request_id, GATEWAY, has_everything=bool(HAS_EVERYTHING))
    assert crowd.core.finished[request_id].sequences, "a kept one can be asked for again"


def test_of_many_tenants_those_that_were_served_most_are_remembered() -> None:
    shares = Shares({})
    for number in range(MAX_TENANTS + 1):
        shares.charge_prompt(f"t{number}", number)
    shares.forget_absent({"t0"})
    assert shares.num_tenants == MAX_TENANTS // 2 + 1
    assert shares.served(f"t{MAX_TENANTS}") == MAX_TENANTS
    assert shares.served("t1") == 0.0
    assert "t0" in shares._served, "who is here is not forgotten"


def test_what_a_worker_had_goes_with_it() -> None:
    for leave in (Scheduler.lose_worker, Scheduler.retire_worker):
        world = World(workers=2)
        core = world.scheduler
        world.join_draft("d", FakeDraft())
        for name in list(core.replicas):
            core.ask_holdings(name)
        leave(core, "w0")
        for table in (core.replicas, core._batchers, core._reconciliation._audits):
            assert list(table) == ["w1"], leave
        assert list(core._drafting.speculations) == list(core.replicas.values())
        core.lose_draft("d")
        assert not core._drafting.speculations
