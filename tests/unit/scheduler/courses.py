"""Fixed courses of events, and everything that a scheduler says in them: plans, updates for drafts, tokens with their
accounts of time, refusals, notes and counters, as one line for each event.

python -m tests.unit.scheduler.courses NAME     prints what is said, to be compared with what another version says
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import asdict
from typing import Any
from zlib import crc32

import msgspec

from services.scheduler.load import load_of, replica_snapshot
from services.scheduler.state.policy import Policy
from shared.beam import Beam, EarlyStopping
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
from shared.phases import NUM_PHASES
from shared.pooling import Pooling, PoolingKind
from shared.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.beam_world import BeamWorker, BeamWorld
from tests.unit.scheduler.fake_draft import FakeDraft
from tests.unit.scheduler.fake_worker import capacity
from tests.unit.scheduler.storm import TamperedStorm

MOTIFS = [[(7 * i + j) % 50 for j in range(8)] for i in range(4)]  # prompts begin with these
DIGITS = 4  # of a line
TENANTS = ("large", "small", "other")


def said(value: Any) -> Any:
    """A message as plain values, without its defaults: what is appended to it later, and not used, changes nothing."""
    if isinstance(value, AdmittedSequence):
        return [value.row, value.request_id, value.index, len(value.token_ids), value.seed, value.params.logprobs]
    if isinstance(value, Message):
        defaults = dict(zip(reversed(value.__struct_fields__), reversed(value.__struct_defaults__), strict=False))
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: said(one) for name, one in fields.items() if name not in defaults or one != defaults[name]}
    if isinstance(value, dict):
        return {str(key): said(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [said(one) for one in value]
    if isinstance(value, float):
        return round(value, 7)
    return value.hex() if isinstance(value, bytes) else value if isinstance(value, (int, type(None))) else str(value)


class CourseWorker(BeamWorker):
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


class Course(BeamWorld):
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
        self.workers[name] = CourseWorker(self.workers[name].capacity)

    def note(self, event: str, *details: Any) -> None:
        """What was said since the last event belongs to this one."""
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
            self.ask(n=1, max_tokens=1, min_tokens=0, pooling=Pooling(self.random.choice(list(PoolingKind))))

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
            self.workers[name], self.plans[name] = CourseWorker(self.workers[name].capacity), deque()
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


def shares() -> list[str]:
    """Three tenants of different weight want more rows and blocks than there are."""
    policy = Policy(max_num_batched_tokens=24, tenant_weights="large=2,small=0.5", fair_prefill_tokens=12)
    course = Course(policy, 1, 1, num_blocks=24, max_num_seqs=5, max_model_len=96)
    for index in range(260):
        course.ask() if index % 8 == 0 else course.turn()
    return course.finish()


def priorities() -> list[str]:
    """Several workers, prompts in chunks, little room: what is urgent goes ahead."""
    policy = Policy(
        max_num_batched_tokens=20, long_prefill_token_threshold=9, scheduling_policy="priority", priority_ageing=2.0,
        routing_policy="least_loaded",
    )  # fmt: skip
    course = Course(policy, 2, 2, num_blocks=14, max_num_seqs=4, max_model_len=96)
    for index in range(220):
        course.ask() if index % 9 == 0 else course.turn()
    return course.finish()


def losses() -> list[str]:
    """Workers of several sizes and kinds come and go, clients too."""
    course = Course(Policy(max_num_batched_tokens=32), 2, 3, num_blocks=20, max_num_seqs=6, max_model_len=96)
    course.acknowledges = False
    for index in range(500):
        if index % 11 == 0:
            course.ask() if index % 3 else course.look()
        elif index % 7 == 0:
            course.cut()
        elif index % 19 == 0:
            course.change()
        else:
            course.turn()
    return course.finish()


def drafts() -> list[str]:
    """Draft tokens, as many as measured times make worth it; drafts that forget, come and go."""
    course = Course(Policy(max_num_batched_tokens=64), 1, 4, num_blocks=64, max_num_seqs=6, max_model_len=128)
    course.join_draft("d", FakeDraft(skill=0.9, forgets=0.02))
    for index in range(700):
        if index == 300:
            course.join_draft("e", FakeDraft(1, skill=0.5, num_rows=2))
        if index == 500:
            course.lose_draft("d")
        if index % 20 == 0:
            course.ask(max_tokens=60, ignore_eos=True, stop_token_ids=[])
        course.turn()
        course.draft()
    return course.finish()


def fixed_drafts() -> list[str]:
    """A fixed number of draft tokens, among requests that are cut and workers that die."""
    policy = Policy(max_num_batched_tokens=24, num_draft_tokens=3, acceptance="rejection")
    course = Course(policy, 2, 5, num_blocks=16, max_num_seqs=4, max_model_len=96)
    course.join_draft("d", FakeDraft(2, skill=0.7, num_rows=3))
    for index in range(240):
        if index % 9 == 0:
            course.ask()
        elif index % 13 == 0:
            course.cut()
        elif index % 41 == 0:
            course.change()
        course.turn()
        course.draft()
    return course.finish()


def beams() -> list[str]:
    """Searches beside samples."""
    course = Course(Policy(max_num_batched_tokens=32), 1, 6, num_blocks=24, max_num_seqs=6, max_model_len=96)
    for index in range(200):
        if index % 14 == 0:
            course.search()
        elif index % 33 == 0:
            course.ask(n=1, logprobs=2)
        elif index % 29 == 0:
            course.cut()
        course.turn()
    return course.finish()


class NotedStorm(TamperedStorm):
    """A storm of which the ledgers are written down behind each event."""

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        super().__init__(seed)

    def event(self) -> None:
        super().event()
        core, held = self.world.scheduler, []
        for replica in core.replicas.values():
            pool = replica.pool
            names = [name and name.hex()[:4] for name in pool.hashes]
            held += [list(pool.available), pool.ref_counts, pool.generations, names, pool.num_evictions]
            held += [replica.free_rows, replica.released_rows, replica_snapshot(replica)]
        notes = [[note.event, note.header.request_id, note.fields] for note in core.journal.take()]
        self.lines.append(msgspec.json.encode(said([held, notes, asdict(core.counters)])).decode())


def ledgers() -> list[str]:
    """Links that lose and repeat, ledgers that go wrong and are set right."""
    lines: list[str] = []
    for seed in (3, 8):
        storm = NotedStorm(seed)
        storm.run(700)
        lines += storm.lines
    return lines


COURSES = {course.__name__: course for course in (shares, priorities, losses, drafts, fixed_drafts, beams, ledgers)}


def digests(lines: list[str]) -> str:
    """DIGITS hexadecimal digits for each line."""
    return "".join(f"{crc32(line.encode()) & 0xFFFF:04x}" for line in lines)


if __name__ == "__main__":
    print("\n".join(COURSES[sys.argv[1]]()))
