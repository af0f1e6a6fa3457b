"""The scheduler's core and real model runners, called one after the other: the engine without its processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from services.draft.proposer import Proposer
from services.scheduler.invariants import check
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.worker.adapters import AdapterLoading
from shared.config import Settings
from shared.messages import (
    Adapter,
    AddRequest,
    FinishReason,
    LoadAdapter,
    RequestHeader,
    RequestRejected,
    StepPlan,
    TokenLogprobs,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.integration.drafts.drafting import InProcessDraft, make_proposer
from tests.kernels.cpu.natives import load_build

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "pageant-stories"
SETTINGS = Settings.of(model=str(MODEL), dtype="float32", num_blocks=256, max_num_seqs=64, num_threads=1)
STEP_SECONDS = 0.01  # of the engine's own clock


class Ask(msgspec.Struct, frozen=True):
    """One request of a test: prompt ids and parameters."""

    prompt: list[int]
    params: SamplingParams
    adapter: Adapter | None = None


def ask(prompt: list[int], **params: Any) -> Ask:
    params = {"max_tokens": 24, "seed": 11, "ignore_eos": True, **params}
    return Ask(prompt, SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16))


class Output(msgspec.Struct):
    """One sequence's output, as its detokenizer got it."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None


class Engine:
    """Generates; `runners` are the workers, `drafts` the drafts, by name.  Time passes only with steps."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        workers: int = 1,
        has_windows: bool = False,
        shares_blocks: bool = False,
        adapters: Sequence[Path] = (),
        **settings: Any,
    ) -> None:
        """`has_windows`: the model has layers that see a window; `shares_blocks`: they have no blocks of their own.

        With `adapters` requests that name none have one of these or none, as their prompt says.
        """
        self._shares_blocks = shares_blocks
        self._has_windows = has_windows
        self.settings = SETTINGS.replace(**settings)
        self.core = Scheduler(policy or Policy())
        self.core.set_detokenizers(["d"])
        self.runners: dict[str, ModelRunner] = {}
        self.drafts: dict[str, InProcessDraft] = {}
        self.now = 0.0
        self.outputs: dict[tuple[str, int], Output] = {}
        self.rejected: list[RequestRejected] = []
        self.plans: list[tuple[str, StepPlan]] = []  # every one that ran, with its worker
        self._epoch = 0
        self._num_asked = 0
        for index in range(workers):
            self.join(f"w{index}")
        self._adapters = [self.load_adapter(path.name, path) for path in adapters]

    @property
    def counters(self) -> Any:
        return self.core.counters

    def join(self, name: str, **settings: Any) -> None:
        """Settings: what this worker has otherwise than the others."""
        if self.settings.engine.kernels == "native":
            load_build("native")
        self._epoch += 1
        runner = self._load(name, self.settings.replace(**settings), not self._shares_blocks)
        assert bool(runner.capacity.sliding) is (self._has_windows and not self._shares_blocks)
        self.runners[name] = runner
        self.core.add_worker(name, self._epoch, self.runners[name].capacity)

    def _load(self, name: str, settings: Settings, has_windows: bool) -> ModelRunner:
        return load_runner(settings, has_windows=has_windows)

    def lose(self, name: str) -> None:
        self.core.lose_worker(name)
        del self.runners[name]

    def join_draft(self, name: str, proposer: Proposer | None = None) -> InProcessDraft:
        """Without a proposer, the one that the settings ask for."""
        self._epoch += 1
        draft = self.drafts[name] = InProcessDraft(proposer or make_proposer(self.settings))
        self.core.add_draft(name, self._epoch, draft.capacity)
        return draft

    def lose_draft(self, name: str) -> None:
        self.core.lose_draft(name)
        del self.drafts[name]

    def add(self, one: Ask, *, priority: int = 0, is_background: bool = False) -> str:
        request_id = f"r{self._num_asked}"
        self._num_asked += 1
        adapter = one.adapter or self._adapter_of(one.prompt)
        header = RequestHeader(request_id, "g", priority=priority, is_background=is_background, adapter=adapter)
        self.core.add(AddRequest(header, one.params, pack_tokens(one.prompt), [0]), now=0.0)
        return request_id

    def _adapter_of(self, prompt: list[int]) -> Adapter | None:
        return [None, *self._adapters][sum(prompt) % (1 + len(self._adapters))]

    def step(self) -> bool:
        busy = False
        for name, runner in list(self.runners.items()):
            plans = list(self._plans(name))
            for plan in plans:
                result = runner.run(plan)
                self._linger()
                self.now += STEP_SECONDS
                self.core.apply(name, result, self.now)
                self.plans.append((name, plan))
            busy |= bool(plans)
        check(self.core)
        self._collect()
        return self._order_adapters() or busy

    def _order_adapters(self) -> bool:
        """Have the workers hold what the core orders.  Whether there was something to do."""
        orders = self.core.adapters.take_orders() if self.core.adapters.has_orders else []
        for name, order in orders:
            bank = self.runners[name].adapters
            assert bank is not None
            loading = AdapterLoading(bank)
            loading.apply(order)
            for answer in loading.turn():
                self.core.adapters.held(answer)
        return bool(orders)

    def load_adapter(self, name: str, path: Path) -> Adapter:
        """As an operator does it; raises LookupError with the reason where that fails."""
        self._num_asked += 1
        self.core.adapters.load(LoadAdapter(f"load{self._num_asked}", "g", name, str(path)))
        while self.step():
            pass
        answers = [answer.adapter for _, answer in self.core.adapters.take_answers()]
        if not answers:
            raise LookupError(self.rejected.pop().message)
        return answers[0]

    def _plans(self, name: str) -> Iterator[StepPlan]:
        """Up to two: what follows drafts waits for what becomes of them."""
        for _ in range(2):
            if plan := self._plan(name):
                yield plan

    def _plan(self, name: str) -> StepPlan | None:
        """The next plan; where drafts are asked for, with their answers, and once it is too late without."""
        if plan := self.core.schedule(name, self.now):
            return plan
        self._talk()
        if plan := self.core.schedule(name, self.now):
            return plan
        if (wake_time := self.core.wake_time) is None:
            return None
        self.now = max(self.now, wake_time)
        return self.core.schedule(name, self.now)

    def _talk(self) -> None:
        for name, update in self.core.drafts.take_updates():
            self.drafts[name].tell(update)
            for answer in self.drafts[name].answers():
                self.core.propose(answer)

    def _linger(self) -> None:
        """What drafts say of their own, while the target computes."""
        for draft in self.drafts.values():
            for answer in draft.linger():
                self.core.propose(answer)

    def run(self) -> None:
        while self.step():
            pass
        for replica in self.core.replicas.values():
            assert all(pool.num_available == pool.size for pool in replica.pools), "a block is lost"

    def generate(self, asks: list[Ask]) -> list[list[Output]]:
        """All sequences' outputs of all requests, computed together."""
        ids = [self.add(one) for one in asks]
        self.run()
        assert not self.rejected, self.rejected
        return self.outputs_of(ids, asks)

    def outputs_of(self, ids: Sequence[str], asks: Sequence[Ask]) -> list[list[Output]]:
        """The outputs of requests that were added one by one."""
        return [[self.outputs[i, n] for n in range(one.params.n)] for i, one in zip(ids, asks, strict=True)]

    def _collect(self) -> None:
        self.rejected += [rejection for _, rejection in self.core.outbound.take_rejections()]
        for batch in self.core.outbound.take_batches().values():
            for stream in batch.opened:
                self.outputs[stream.header.request_id, stream.index] = Output(prompt_logprobs=stream.prompt_logprobs)
            for tokens in batch.sequences:
                output = self.outputs[tokens.request_id, tokens.index]
                output.token_ids += tokens.token_ids
                output.logprobs += tokens.logprobs
                output.finish_reason = tokens.finish_reason


def token_ids(outputs: list[list[Output]]) -> list[list[list[int]]]:
    return [[output.token_ids for output in request] for request in outputs]
