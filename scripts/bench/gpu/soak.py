"""A soak at the worst shapes: every kind of step that takes much memory, in any order, for as long as is asked.

The pool is what the settings' share of the card leaves; so every step runs with all other memory taken.  Nothing may
fail, and what is taken of the card in the end is the share that was asked for, within a fiftieth of the card.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.core import WORKER, asked, core_of, forget_news
from scripts.bench.gpu.steps import BLOCK
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.config import Settings
from shared.messages import DraftCapacity, DraftProposals

DRAFT, NUM_OUTPUT = "draft", 16  # tokens of each request
ALL_FEATURES: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "logprobs": 20,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "bad_words_token_ids": [[7, 9]],
}  # fmt: skip
WHOLE_VOCABULARY: dict[str, Any] = {"temperature": 1.0, "logprobs": -1}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0}, ALL_FEATURES,
    {"temperature": 0.8, "logprobs": 20, "prompt_logprobs": 20}, {"temperature": 1.0, "top_p": 0.5},
)  # fmt: skip


class Soak:
    """Turns of requests that are all alike, each planned by a scheduler's core of its own; drafts are drawn at random.

    Raises what a step raises: torch's out-of-memory error above all.
    """

    def __init__(self, runner: ModelRunner, max_num_batched_tokens: int, num_drafts: int) -> None:
        self.num_steps = 0
        self.counts: Counter[str] = Counter()  # turns of each shape
        self._runner, self._budget, self._num_drafts = runner, max_num_batched_tokens, num_drafts
        self._rng = random.Random(1)
        rows, longest = runner.capacity.max_num_seqs, runner.capacity.max_model_len - NUM_OUTPUT
        self._shapes = {  # requests, and tokens of each one's prompt
            "one long prompt": (1, longest),
            "many short prompts": (rows, min(2 * BLOCK, longest)),
            "prompts of one step": (4, min(max_num_batched_tokens // 4, longest)),
        }

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shape = self._rng.choice(tuple(self._shapes))
            self._turn(*self._shapes[shape])
            self.counts[shape] += 1

    def _turn(self, count: int, length: int) -> None:
        rng, vocabulary = self._rng, range(self._runner.capacity.vocab_size)
        kind = WHOLE_VOCABULARY if count == 1 else rng.choice(KINDS)
        core = self._core(drafts=rng.random() < 0.5)
        for index in range(count):
            core.add(asked(f"r{index}", rng.choices(vocabulary, k=length), max_tokens=NUM_OUTPUT, **kind), now=0.0)
        while core.requests:
            self._step(core)

    def _core(self, *, drafts: bool) -> Scheduler:
        capacity, num_drafts = self._runner.capacity, self._num_drafts
        policy = Policy(
            max_num_batched_tokens=self._budget, enable_prefix_caching=False, num_draft_tokens=num_drafts,
            max_num_draft_tokens=num_drafts, max_logprobs=capacity.vocab_size,
            acceptance=self._rng.choice(("coupled", "rejection")),
        )  # fmt: skip
        core = core_of(capacity, policy)
        if drafts:
            core.add_draft(DRAFT, 2, DraftCapacity(capacity.max_num_seqs, capacity.max_model_len, 0, "random"))
        self._runner.reset()
        return core

    def _step(self, core: Scheduler) -> None:
        plan = core.schedule(WORKER, time.monotonic())
        if plan is None:  # it waits for the drafts that it has asked for
            self._propose(core)
            plan = core.schedule(WORKER, time.monotonic())
        if plan is None:
            raise RuntimeError(f"the scheduler has nothing to plan for {len(core.requests)} requests")
        result = self._runner.run(plan)
        if result.refused_rows:
            raise RuntimeError(f"step {plan.step_id} refused rows: {result.refused_rows}")
        core.apply(WORKER, result, time.monotonic())
        forget_news(core)
        self.num_steps += 1

    def _propose(self, core: Scheduler) -> None:
        vocabulary = range(self._runner.capacity.vocab_size)
        for _, update in core.take_updates():
            known = [old + new for old, new in zip(update.num_tokens, update.num_new, strict=True)]
            ids = self._rng.choices(vocabulary, k=sum(update.num_wanted))
            core.propose(DraftProposals(update.epoch, update.update_id, update.rows, known, update.num_wanted, ids))


def soak_settings(directory: Path, device: Literal["cpu", "cuda"], **changes: Any) -> Settings:
    own = {
        "model": str(directory), "load_format": "dummy", "device": device, "kernels": "torch", "block_size": BLOCK,
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "draft": "ngram", "max_num_draft_tokens": 8,
    }  # fmt: skip
    return Settings.of(**own | changes)


def run_soak(settings: Settings, seconds: float) -> Soak:
    soak = Soak(
        load_runner(settings, has_windows=False),
        settings.scheduling.max_num_batched_tokens,
        settings.speculation.max_num_draft_tokens,
    )
    soak.run(seconds)
    return soak


def soaked(directory: Path, seconds: float) -> tuple[float, float, int]:
    """The share of the card that was asked for, the one that is taken in the end, and steps."""
    settings = soak_settings(directory, "cuda")
    soak = run_soak(settings, seconds)
    free, total = torch.cuda.mem_get_info()  # nothing else should run on the card
    return settings.memory.gpu_memory_utilization, 1 - free / total, soak.num_steps
