"""A scheduler with fake workers and a client that knows what must come out."""

from __future__ import annotations

from collections import deque
from typing import Any

from services.scheduler.invariants import check
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.errors import RejectCode
from shared.messages import Adapter, AddRequest, DraftUpdate, FinishReason, RequestHeader, StepPlan, WorkerCapacity
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity, next_token


class World:
    """Everything around one core: it checks the invariants after each event."""

    def __init__(self, policy: Policy | None = None, workers: int = 1, **limits: Any) -> None:
        self.scheduler = self.make_core(policy or Policy(max_num_batched_tokens=32))
        self.limits = limits
        self.workers: dict[str, FakeWorker] = {}
        self.plans: dict[str, deque[StepPlan]] = {}
        self.drafts: dict[str, FakeDraft] = {}
        self.updates: dict[str, deque[DraftUpdate]] = {}
        self.now = 0.0
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.rejected: dict[str, RejectCode] = {}
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.trace: list[StepPlan] = []
        self.num_events = 0
        self.num_background_steps = 0
        self.acknowledges = True
        self.epoch = 0
        self.scheduler.set_detokenizers(["d0"])
        for index in range(workers):
            self.join(f"w{index}")

    def make_core(self, policy: Policy) -> Scheduler:
        return Scheduler(policy)

    # -- events

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        self.epoch += 1
        self.workers[name] = FakeWorker(size or capacity(**self.limits))
        self.plans[name] = deque()
        self.scheduler.add_worker(name, self.epoch, self.workers[name].capacity)
        self.after()

    def lose(self, name: str) -> None:
        self.scheduler.lose_worker(name)
        del self.workers[name], self.plans[name]
        self.after()

    def join_draft(self, name: str, draft: FakeDraft) -> None:
        self.epoch += 1
        self.drafts[name], self.updates[name] = draft, deque()
        self.scheduler.add_draft(name, self.epoch, draft.capacity)
        self.after()

    def lose_draft(self, name: str) -> None:
        self.scheduler.lose_draft(name)
        del self.drafts[name], self.updates[name]
        self.after()

    def propose(self, name: str) -> bool:
        """Let a draft read its oldest update and answer."""
        if not self.updates[name]:
            return False
        for proposals in self.drafts[name].answer(self.updates[name].popleft()):
            assert self.scheduler.propose(proposals)
            self.after()
        return True

    def add(
        self,
        request_id: str,
        prompt: list[int],
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        is_background: bool = False,
        adapter: Adapter | None = None,
        retention: float = 0.0,
        is_gathered: bool = False,
        **params: Any,
    ) -> None:
        params = {"max_tokens": 8, "seed": 1, "ignore_eos": True, **params}
        resolved = SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(
            request_id, "g0", tenant=tenant, priority=priority, cache_salt=salt, is_background=is_background,
            adapter=adapter,
            retention=retention,
            is_gathered=is_gathered,
        )  # fmt: skip
        self.scheduler.add(AddRequest(header, resolved, pack_tokens(prompt), [0]), now=0.0)
        for index in range(resolved.n):
            most, digest = self.limits.get("max_model_len", 128), "" if adapter is None else adapter.digest
            self.wanted[request_id, index] = expected(prompt, resolved, index, most, digest)
        self.after()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.after()

    def plan(self, name: str) -> StepPlan | None:
        plan = self.scheduler.schedule(name, self.now)
        for draft, update in self.scheduler.take_updates():
            self.updates[draft].append(update)
        if plan is not None:
            self.plans[name].append(plan)
            self.trace.append(plan)
            assert sum(plan.num_scheduled_tokens) <= self.scheduler.policy.max_num_batched_tokens, "beyond the budget"
            self.check_background(name)
        self.after()
        return plan

    def check_background(self, name: str) -> None:
        """A plan was made: one of background sequences is made only where there are no others, by itself, and is
        short."""
        replica, policy = self.scheduler.replicas[name], self.scheduler.policy
        step = replica.in_flight[-1]
        if any(sequence.is_background for sequence in step.sequences):
            others = [sequence for sequence in (*replica.running, *replica.waiting) if not sequence.is_background]
            assert not others, "background sequences rest while others are here"
            assert len(replica.in_flight) == 1, "the next request would wait for more than one step"
            if policy.enable_chunked_prefill:
                assert sum(step.num_scheduled) <= policy.background_step_tokens
            self.num_background_steps += 1

    def answer(self, name: str) -> bool:
        """Let a worker execute its oldest plan."""
        if not self.plans[name]:
            return False
        result = self.workers[name].run(self.plans[name].popleft())
        self.now += 0.01
        assert self.scheduler.apply(name, result, self.now)
        self.after()
        return True

    def step(self) -> bool:
        """Plan and answer once at each worker; False when there was nothing to do."""
        busy = False
        for name in list(self.workers):
            self.plan(name)
            self.plan(name)
            busy |= self.answer(name)
        for name in list(self.drafts):
            busy |= self.propose(name)
        if not busy and (wake_time := self.scheduler.wake_time) is not None:
            self.now, busy = max(self.now, wake_time), True
        return busy

    def run(self, limit: int = 100_000) -> int:
        """Go on until nothing is left to do; returns the number of rounds."""
        rounds = 0
        while self.step():
            rounds += 1
            assert rounds < limit, "no end in sight"
        return rounds

    # -- what came out

    def after(self) -> None:
        self.check()
        self.gather()

    def check(self) -> None:
        check(self.scheduler)

    def gather(self) -> None:
        """Take what the core says."""
        self.num_events += 1
        for batch in self.scheduler.outbound.take_batches().values():
            opened = {(stream.header.request_id, stream.index) for stream in batch.opened}
            for tokens in batch.sequences:
                key = (tokens.request_id, tokens.index)
                self.take_tokens(key, tokens.offset, tokens.token_ids, is_again=key in opened)
                if tokens.finish_reason is not None:
                    self.finished[key] = tokens.finish_reason
        if self.acknowledges:
            for request_id in list(self.scheduler.finished):
                self.scheduler.abort(request_id)
        for _, rejection in self.scheduler.outbound.take_rejections():
            self.rejected[rejection.request_id] = rejection.code

    def take_tokens(self, key: tuple[str, int], offset: int, token_ids: list[int], *, is_again: bool) -> None:
        """Some of a stream's; those of one that is opened again begin at the start."""
        output = self.outputs.setdefault(key, [])
        del output[offset:]
        output += token_ids

    def assert_outputs(self, *request_ids: str) -> None:
        """Every named request (default: all that finished) has exactly its solo output."""
        keys = [key for key in self.finished if not request_ids or key[0] in request_ids]
        assert keys
        for key in keys:
            assert self.outputs[key] == self.wanted[key], key

    def assert_idle(self) -> None:
        """Nothing is held, and no block is lost."""
        assert not self.scheduler.requests
        assert not self.scheduler.finished
        for replica in self.scheduler.replicas.values():
            assert all(pool.num_available == pool.size for pool in replica.pools)
            assert replica.num_free_rows == replica.capacity.max_num_seqs
            assert not replica.in_flight


def expected(prompt: list[int], params: SamplingParams, index: int, max_model_len: int, adapter: str = "") -> list[int]:
    """What a sequence generates alone."""
    history = list(prompt)
    while True:
        token = next_token(history, (params.seed or 0) + index, adapter)
        history.append(token)
        num_output = len(history) - len(prompt)
        if num_output >= params.min_tokens and (
            token in params.stop_token_ids or (token == 0 and not params.ignore_eos)
        ):
            break
        if num_output >= (params.max_tokens or 1) or len(history) >= max_model_len:
            break
    return history[len(prompt) :]
