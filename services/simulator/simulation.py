"""Virtual time: arrivals and step results in order, each handled by the scheduler's core as in service.

Every worker executes its plans one after the other, two in flight; the scheduler is one process, so what comes while it
is busy waits.  Nothing here is random: the same requests and figures give the same run, to the last digit.  Where a
worker's steps do nothing but give each sequence its next token, the core is not asked (`cruise.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec

from services.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request
from services.simulator.cruise import ANY_TOKEN, Cruise, cruise_of
from services.simulator.hardware import StepTime, work_of
from services.simulator.observer import Observer, RequestRecord, SilentJournal
from shared.messages import AddRequest, RequestHeader, StepResult, WorkerCapacity
from shared.metrics import ModelWork
from shared.metrics.steps import StepWork
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.workload import BYTE_VOCABULARY, BlockPrompt, LoadRequest, TokenPrompt

VOCAB_SIZE = BYTE_VOCABULARY  # the tokens' values do not matter here; of small numbers Python keeps one object each
DETOKENIZER = "detokenizer"


class Delays(msgspec.Struct, frozen=True):
    """What everything but the worker takes, in seconds; the defaults were measured on the services of this project."""

    inbound: float = 1.5e-3  # client to scheduler
    inbound_per_token: float = 2e-7  # of the prompt: tokenizing, unpacking, hashing
    outbound: float = 1e-3  # scheduler to client
    link: float = 1e-4  # scheduler to worker, and back
    per_step: float = 3e-5  # of the scheduler's time: planning a step and taking its result in
    per_sequence: float = 2.5e-6  # the same, for each sequence in it
    per_arrival: float = 0.0  # of a worker's time, where services that let requests in share its processors
    scatter: tuple[float, ...] = ()  # by how much the way of one request or another to the scheduler was longer


@dataclass(slots=True, eq=False)
class Worker:
    """One simulated worker: a device that is free at a known time."""

    replica: Replica
    number: int
    free_at: float = 0.0
    taken: float = 0.0  # seconds that requests which came took from it, and its next step takes longer for
    busy: float = 0.0  # seconds so far
    num_steps: int = 0
    cruise: Cruise | None = None  # while it goes on without the core


class StepTotals(msgspec.Struct):
    """Sums over all steps of all workers."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_samples: int = 0
    num_pairs: int = 0

    def count(self, work: StepWork, num_steps: int, num_pairs: int) -> None:
        """So many steps that are alike but for their pairs."""
        self.num_tokens += num_steps * work.num_tokens
        self.num_sequences += num_steps * work.num_sequences
        self.num_samples += num_steps * work.num_samples
        self.num_pairs += num_pairs


class Simulation:
    """One run: a scheduler, its workers, the requests that come."""

    def __init__(
        self,
        policy: Policy,
        capacity: WorkerCapacity,
        num_workers: int,
        step_time: StepTime,
        delays: Delays,
        model: ModelWork | None = None,
    ) -> None:
        self.observer = Observer()
        self.core = Scheduler(policy, SilentJournal(), self.observer)
        self.core.set_detokenizers([DETOKENIZER])
        self.workers: dict[str, Worker] = {}
        for index in range(num_workers):
            self.core.add_worker(f"w{index}", index + 1, capacity)
            self.workers[f"w{index}"] = Worker(self.core.replicas[f"w{index}"], index)
        self.usage = StepTotals()
        self.model = model
        self.end = 0.0
        self._step_time, self._delays = step_time, delays
        self._events: list[tuple[float, int, Worker | None]] = []  # time, order, worker of a result; None: arrival
        self._num_events = 0
        self._scheduler_free_at = 0.0
        self._arriving: LoadRequest | None = None
        self._num_arrived = 0
        self._params: dict[int, SamplingParams] = {}

    def run(self, requests: Iterator[LoadRequest]) -> None:
        """Until every request has ended.  Raises RuntimeError where some never would."""
        self._await_arrival(requests)
        events = self._events
        while events:
            now, _, worker = heappop(events)
            if now < self._scheduler_free_at:
                now = self._scheduler_free_at
            if worker is None:
                self._arrive(now)
                self._await_arrival(requests)
            elif worker.cruise is None or not self._go_on(worker, worker.cruise, now):
                self._take_result(worker, now)
            self.end = now
        if self.core.requests:
            raise RuntimeError(f"{len(self.core.requests)} requests never end: the scheduler has nothing to plan")

    # -- events

    def _at(self, time: float, worker: Worker | None = None) -> None:
        self._num_events += 1
        heappush(self._events, (time, self._num_events, worker))

    def _await_arrival(self, requests: Iterator[LoadRequest]) -> None:
        self._arriving = next(requests, None)
        if self._arriving is not None:
            delay = self._delays.inbound + self._delays.inbound_per_token * self._arriving.num_prompt_tokens
            self._at(self._arriving.time + max(0.0, delay + self._scattered(self._arriving)))

    def _scattered(self, request: LoadRequest) -> float:
        """One of the given differences, always the same for the same place and prompt."""
        scatter = self._delays.scatter
        return scatter[hash((self._num_arrived, request.num_prompt_tokens)) % len(scatter)] if scatter else 0.0

    def _arrive(self, now: float) -> None:
        request, request_id = self._arriving, str(self._num_arrived)
        assert request is not None and isinstance(request.prompt, BlockPrompt | TokenPrompt)
        self._num_arrived += 1
        record = RequestRecord(request.time, request.num_prompt_tokens, tenant=request.tenant)
        self.observer.records[request_id] = record
        prompt = request.prompt.token_ids(VOCAB_SIZE)
        header = RequestHeader(request_id, "gateway", tenant=request.tenant)
        self.core.add(AddRequest(header, self._sampling(request.max_tokens), prompt), now)
        if added := self.core.requests.get(request_id):
            worker = self.workers[added.sequences[0].worker]
            if worker.free_at > now:
                worker.taken += self._delays.per_arrival
            self._plan(worker, now)

    def _sampling(self, max_tokens: int) -> SamplingParams:
        if max_tokens not in self._params:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self._params[max_tokens] = params.resolved(GenerationDefaults(), max_tokens=max_tokens)
        return self._params[max_tokens]

    def _plan(self, worker: Worker, now: float) -> None:
        """Plans until two are in flight."""
        replica = worker.replica
        while len(replica.in_flight) < MAX_STEPS_IN_FLIGHT and self.core.schedule(replica.instance, now) is not None:
            work = work_of(replica.in_flight[-1])
            worker.num_steps += 1
            self.usage.count(work, 1, work.num_pairs)
            now = self._send(worker, work, now)
        self._scheduler_free_at = now

    def _send(self, worker: Worker, work: StepWork, now: float) -> float:
        """A plan takes the scheduler's time, until the moment that is returned, and then the worker's."""
        delays = self._delays
        now += delays.per_step + delays.per_sequence * work.num_sequences
        arrival, free_at = now + delays.link, worker.free_at
        begin = free_at if free_at > arrival else arrival
        seconds = self._step_time.seconds(work, begin, worker.number) + worker.taken
        worker.taken = 0.0
        worker.free_at = free_at = begin + seconds
        worker.busy += seconds
        self._at(free_at + delays.link, worker)
        return now

    def _go_on(self, worker: Worker, cruise: Cruise, now: float) -> bool:
        """Take a result and plan a step without the core; False where it has to be asked."""
        if cruise.go_on(now, now + self._delays.outbound):
            self._scheduler_free_at = self._send(worker, cruise.work, now)
            return True
        cruise.settle()
        worker.cruise = None
        worker.num_steps += cruise.num_steps
        self.usage.count(cruise.work, cruise.num_steps, cruise.num_pairs)
        return False

    def _take_result(self, worker: Worker, now: float) -> None:
        replica = worker.replica
        step = replica.in_flight[0]
        tokens = [ANY_TOKEN] * sum(step.num_samples)
        self.observer.now = now + self._delays.outbound
        self.core.apply(replica.instance, StepResult(replica.epoch, step.step_id, step.num_samples, tokens), now)
        for request_id in self.observer.take_finished():
            self._forget(self.core.finished[request_id])
        self._plan(worker, now)
        worker.cruise = cruise_of(self.core, replica, self.observer)

    def _forget(self, request: Request) -> None:
        """Its client has everything.  Request and sequences refer to each other, and prompts are long: no search for
        garbage should be needed to be rid of them."""
        self.core.abort(request.request_id)
        request.sequences.clear()
