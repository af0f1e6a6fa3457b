"""A world that writes down everything that its scheduler says, as one line for each event: plans, updates for drafts,
tokens with their accounts of time, refusals, notes and counters."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict
from typing import Any

import msgspec

from services.scheduler.load import load_of, replica_snapshot
from services.scheduler.state.policy import Policy
from shared.messages import (
    AddRequest,
    AdmittedSequence,
    AttachRequest,
    Holdings,
    LatencyBreakdown,
    Message,
    RequestHeader,
    StepPlan,
    StepResult,
    StopMatched,
    StreamLost,
    TokenLogprobs,
    WorkerCapacity,
)
from shared.metrics.histogram import STEP_TOKENS, Histogram
from shared.packing import pack_tokens
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.tracing.phases import NUM_PHASES
from tests.unit.scheduler.worlds.beam_world import BeamWorker, BeamWorld
from tests.unit.scheduler.worlds.fake_worker import capacity

MOTIFS = [[(7 * i + j) % 50 for j in range(8)] for i in range(4)]  # prompts begin with these
TENANTS = ("large", "small", "other")


def said(value: Any) -> Any:
    """A message as plain values, without its defaults: what is appended to it later, and not used, changes nothing."""
    if isinstance(value, AdmittedSequence):
        return [value.row, value.request_id, value.index, len(value.token_ids), value.seed, value.params.logprobs]
    if isinstance(value, Message):
        fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        return {field.name: said(one) for field, one in fields if not is_default(field, one)}
    if isinstance(value, dict):
        return {str(key): said(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [said(one) for one in value]
    if isinstance(value, float):
        return round(value, 7)
    return value.hex() if isinstance(value, bytes) else value if isinstance(value, (int, type(None))) else str(value)


def is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return field.default is not msgspec.NODEFAULT and bool(value == field.default)


class GoldenWorker(BeamWorker):
    """Says log-probabilities and embeddings of prompts too."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        super().__init__(capacity)
        self.admitted: dict[int, AdmittedSequence] = {}

    def run(self, plan: StepPlan) -> StepResult:
        self.admitted |= {one.row: one for one in plan.admitted}
        result = super().run(plan)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        embeddings: dict[int, bytes] = {}
        columns = zip(plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, result.num_sampled, strict=True)
        for entry, (row, computed, scheduled, num_sampled) in enumerate(columns):
            known = self.admitted[row]
            if known.params.prompt_logprobs is not None:
                shown = self.rows[row].tokens[computed + 1 : min(computed + scheduled + 1, known.num_prompt_tokens)]
                logprobs[entry] = [TokenLogprobs([token], [-token / 8], 1) for token in shown]
            if known.params.pooling is not None and num_sampled:
                embeddings[entry] = bytes([row, computed])
        return msgspec.structs.replace(result, prompt_logprobs=logprobs, embeddings=embeddings)


class GoldenRun(BeamWorld):
    """A world that writes down what its scheduler says."""

    def __init__(self, policy: Policy, workers: int, seed: int, **limits: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.heard: list[Any] = []
        self.num_added = 0
        self.kept: list[RequestHeader] = []
        super().__init__(policy, 0, **limits)
        self.now = self.scheduler.clock.now = 1000.0
        for index in range(workers):
            self.join(f"w{index}")

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        super().join(name, size)
        self.workers[name] = GoldenWorker(self.workers[name].capacity)

    def note(self, event: str, *details: Any) -> None:
        """Messages since the last event belong to this one."""
        core = self.scheduler
        heard = [*self.heard, core.wake_time, core.num_waiting, len(core.parking), len(core.unassigned)]
        heard += [[note.event, note.header.request_id, note.fields, note.at] for note in core.journal.take()]
        self.lines.append(f"{event} {msgspec.json.encode([said(list(details)), said(heard)]).decode()}")
        self.heard = []

    def after(self) -> None:
        self.gather()

    def gather(self) -> None:
        self.heard += [[address, batch] for address, batch in self.scheduler.outbound.take_batches().items()]
        self.heard += self.scheduler.outbound.take_rejections()
        if self.acknowledges:
            for request_id in sorted(self.scheduler.finished):
                self.scheduler.abort(request_id)

    # -- events

    def ask(self, **more: Any) -> None:
        """A request of one of many kinds."""
        r = self.random
        self.num_added += 1
        request_id = f"r{self.num_added}"
        prompt = [token for _ in range(r.randrange(4)) for token in r.choice(MOTIFS)]
        prompt += [r.randrange(50) for _ in range(r.randrange(1, 20))]
        params: dict[str, Any] = {"max_tokens": r.randrange(1, 24), "seed": r.randrange(99), "ignore_eos": True}
        params |= {"n": r.choice([1, 1, 1, 3]), "speculate": r.random() < 0.9, "min_tokens": r.choice([0, 0, 2])}
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        if r.random() < 0.3:
            params |= {"stop_token_ids": [r.randrange(50) for _ in range(6)], "ignore_eos": False}
        resolved = SamplingParams(**(params | more)).resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(
            request_id, r.choice(["g0", "g1"]), tenant=r.choice(TENANTS), priority=r.randrange(3),
            cache_salt=r.choice(["", "", "salt"]), arrival_time=self.now - 0.01, is_kept=r.random() < 0.2,
            deadline=self.now + r.randrange(1, 40) / 10 if r.random() < 0.1 else None,
        )  # fmt: skip
        latency = LatencyBreakdown([0] * NUM_PHASES, self.now - 0.005) if r.random() < 0.8 else None
        request = AddRequest(header, resolved, pack_tokens(prompt), [0], latency=latency)
        if r.random() < 0.1 and resolved.beam is None:
            has = [pack_tokens([r.randrange(1, 50) for _ in range(r.randrange(3))]) for _ in range(resolved.n)]
            ended = [False] * resolved.n
            request = msgspec.structs.replace(request, is_resumed=True, sent_token_ids=has, sent_finished=ended)
        if header.is_kept:
            self.kept.append(header)
        self.scheduler.add(request, self.now)
        self.after()
        self.note("add", request_id, len(prompt))

    def search(self) -> None:
        """A beam search."""
        r = self.random
        width = r.randrange(1, 5)
        beam = Beam(width, r.choice([0.0, 1.0, 2.0]), r.choice(list(EarlyStopping)))
        ends = [r.randrange(50) for _ in range(8)]
        self.ask(beam=beam, n=r.randrange(1, width + 1), stop_token_ids=ends, max_tokens=r.randrange(2, 9))

    def look(self) -> None:
        """A request that wants something of its prompt."""
        if self.random.random() < 0.5:
            self.ask(prompt_logprobs=1, n=self.random.randrange(1, 3))
        else:
            self.ask(
                n=1,
                max_tokens=1,
                min_tokens=0,
                pooling=Pooling(self.random.choice([PoolingKind.LAST, PoolingKind.MEAN])),
            )

    def turn(self) -> None:
        """Plan and answer at one worker."""
        if not self.workers:
            return
        name = self.random.choice(sorted(self.workers))
        for _ in range(2):
            plan = self.scheduler.schedule(name, self.now)
            for draft, update in self.scheduler.take_updates():
                self.updates[draft].append(update)
                self.heard.append([draft, update])
            if plan is not None:
                self.plans[name].append(plan)
            self.after()
            self.note("plan", name, plan)
        if self.plans[name]:
            plan = self.plans[name].popleft()
            result = self.workers[name].take(plan)
            assert isinstance(result, StepResult)
            self.now += 0.002 + 0.0005 * sum(plan.num_scheduled_tokens) + 0.001 * bool(plan.num_draft_tokens)
            taken = self.scheduler.apply(name, result, self.now)
            self.after()
            self.note("result", name, taken)

    def draft(self) -> None:
        """All drafts answer, or time passes."""
        for name in sorted(self.drafts):
            if self.random.random() < 0.95:
                self.now += 0.0003
                while self.propose(name):
                    self.note("proposed", name)
            else:
                self.now += 0.05

    def cut(self) -> None:
        """Something ends, or begins again, at the wish of a client, a detokenizer or a deadline."""
        core, kind = self.scheduler, self.random.randrange(8)
        known = sorted({*core.requests, *core.finished})
        kept = [header.request_id for header in self.kept if header.request_id in core.requests]
        request_id = self.random.choice(kept if kept and kind < 2 else known) if known else ""
        outcome: Any = None
        if kind == 0:
            outcome = core.abort(request_id, self.random.choice(["", "g0"]))
        elif kind == 1:
            outcome = core.abort(request_id, has_everything=True)
        elif kind == 2:
            core.stop_matched(StopMatched(request_id, self.random.randrange(-1, 4), 1))
        elif kind == 3:
            core.stream_lost(StreamLost(request_id, 0))
        elif kind == 4 and self.kept:
            header = self.random.choice(self.kept[-4:])
            latency = LatencyBreakdown([0] * NUM_PHASES, self.now - 0.002)
            core.attach(AttachRequest(header.request_id, "g2", self.now + 5, latency), self.now)
        elif kind == 5:
            self.now += self.random.choice([0.1, 1.0, 31.0])
            outcome = core.expire(self.now)
        elif kind == 6:
            core.set_detokenizers(self.random.choice([["d0"], ["d1", "d2"], ["d0", "d2"]]))
        elif self.random.random() < 0.3:
            outcome = core.abort_gateway("g1")
        self.after()
        self.note("cut", kind, request_id, outcome)

    def change(self) -> None:
        """Workers come and go."""
        core, kind = self.scheduler, self.random.randrange(5)
        name = self.random.choice(sorted(self.workers)) if self.workers else ""
        if kind == 0 and name:
            self.lose(name)
        elif kind == 1 and name:
            core.retire_worker(name)
            del self.workers[name], self.plans[name]
        elif kind == 2 and name:
            self.epoch += 1
            core.renew_worker(name, self.epoch)
            self.workers[name], self.plans[name] = GoldenWorker(self.workers[name].capacity), deque()
        elif kind == 3 and name and not self.plans[name]:
            answer = self.workers[name].take(core.ask_holdings(name))
            assert isinstance(answer, Holdings) and core.reconcile(answer)
            core.check_ledgers()
        elif len(self.workers) < 3:
            self.join(f"w{self.epoch}", self.newcomer())
        self.after()
        self.note("change", kind, name, [alarm.event for alarm in core.journal.take_alarms()])

    def newcomer(self) -> WorkerCapacity:
        r = self.random
        size = capacity(r.choice([10, 24]), r.choice([4, 8, 16]), r.choice([3, 6]), 96)
        return msgspec.structs.replace(size, fingerprint=r.choice(["", "fp_a", "fp_b"]))

    # -- the end

    def finish(self) -> list[str]:
        """The counters and what is held, behind all events."""
        core = self.scheduler
        tokens = Histogram(STEP_TOKENS)
        tokens.observe(3)
        self.note("counters", asdict(core.counters), dict(core.shares._served), load_of(core, "q", tokens))
        for replica in core.replicas.values():
            self.note("worker", replica_snapshot(replica))
        return self.lines
