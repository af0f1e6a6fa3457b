"""A soak at the worst shapes: every kind of step that takes much memory, in any order, for as long as is asked.

The pool is what the settings' share of the card leaves; so every step runs with all other memory taken.  Nothing may
fail, and what is taken of the card in the end is the share that was asked for, within a fiftieth of the card.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from shared.config import Settings
from shared.messages import AdmittedSequence, StepPlan, StepResult
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

BLOCK: Literal[16] = 16
ALL_FEATURES: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "logprobs": 20,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "bad_words_token_ids": [[7, 9]],
}  # fmt: skip
WHOLE_VOCABULARY: dict[str, Any] = {"temperature": 1.0, "logprobs": -1}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0}, ALL_FEATURES,
    {"temperature": 0.8, "logprobs": 20, "prompt_logprobs": 20}, {"temperature": 1.0, "top_p": 0.5},
)  # fmt: skip


@dataclass
class Soak:
    """Rows are numbered as they come; a row's blocks are its own for as long as it lives."""

    runner: ModelRunner
    max_num_batched_tokens: int
    num_drafts: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    step_id: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # tokens of each row
    computed: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # steps of each kind

    def __post_init__(self) -> None:
        self._free = list(range(self.runner.capacity.num_blocks))
        self._prompts: dict[int, list[int]] = {}

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            kind = self.rng.choice(tuple(self.phases))
            self.phases[kind]()
            self.counts[kind] = self.counts.get(kind, 0) + 1

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        return {
            "one long prompt": lambda: self.fill(1, self.runner.capacity.max_model_len - 2 * (self.num_drafts + 1)),
            "many short prompts": lambda: self.fill(self.runner.capacity.max_num_seqs, 2 * BLOCK),
            "prompts of one step": lambda: self.fill(4, self.max_num_batched_tokens // 4),
            "decodes of all rows": lambda: self.decode(drafts=False),
            "verifications of all rows": lambda: self.decode(drafts=True),
        }

    # -- kinds of step

    def fill(self, count: int, length: int) -> None:
        """New rows, all of one kind, computed in as large steps as there may be."""
        length = min(length, self.runner.capacity.max_model_len - 2 * (self.num_drafts + 1))
        self._make_room(count, length)
        kind = WHOLE_VOCABULARY if count == 1 else self.rng.choice(KINDS)
        unused = [row for row in range(self.runner.capacity.max_num_seqs) if row not in self.lengths]
        for row in unused[:count]:
            self._prompts[row] = self.rng.choices(range(self.runner.capacity.vocab_size), k=length)
            self.lengths[row], self.computed[row], self.blocks[row] = length, 0, []
        self._compute(SamplingParams(**kind, ignore_eos=True))

    def _compute(self, params: SamplingParams) -> None:
        """Prompts until all are computed."""
        while left := {row: len(ids) - self.computed[row] for row, ids in self._prompts.items()}:
            schedule, budget = {}, self.max_num_batched_tokens
            for row, count in left.items():
                if budget:
                    schedule[row] = min(count, budget)
                    budget -= schedule[row]
            self._step(schedule, {}, params)
            self._prompts = {row: ids for row, ids in self._prompts.items() if self.computed[row] < len(ids)}

    def decode(self, *, drafts: bool) -> None:
        """Several steps of as many rows as there are."""
        if not self.lengths:
            self.fill(self.runner.capacity.max_num_seqs, 2 * BLOCK)
        for _ in range(8):
            count = self.num_drafts if drafts else 0
            rows = [row for row in self.lengths if self._can_grow(row, count + 1)]
            rows = rows[: self.max_num_batched_tokens // (count + 1)]
            if not rows:
                return self._drop(list(self.lengths))
            proposed = {row: self.rng.choices(range(self.runner.capacity.vocab_size), k=count) for row in rows}
            self._step(dict.fromkeys(rows, count + 1), proposed if drafts else {})
        return None

    # -- plans

    def _step(
        self, schedule: Mapping[int, int], drafts: Mapping[int, Sequence[int]], params: SamplingParams | None = None
    ) -> None:
        admitted = [
            AdmittedSequence(row, pack_tokens(self._prompts[row]), len(self._prompts[row]), params, row, [])
            for row in schedule
            if params is not None and row in self._prompts and self.computed[row] == 0
        ]
        new = [self._grow(row, self.computed[row] + count) for row, count in schedule.items()]
        self.step_id += 1
        plan = StepPlan(
            epoch=1, step_id=self.step_id, admitted=admitted, rows=list(schedule),
            num_computed_tokens=[self.computed[row] for row in schedule],
            num_scheduled_tokens=list(schedule.values()), num_new_blocks=[len(blocks) for blocks in new],
            new_block_ids=[block for blocks in new for block in blocks], block_copies=[], released_rows=self.released,
            num_draft_tokens=[len(drafts[row]) for row in schedule] if drafts else [],
            draft_token_ids=[token for row in schedule for token in drafts[row]] if drafts else [],
            rejection=bool(drafts) and self.rng.random() < 0.5,
        )  # fmt: skip
        self.released = []
        self._take(plan, self.runner.run(plan))

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        if result.refused_rows:
            raise RuntimeError(f"step {plan.step_id} refused rows: {result.refused_rows}")
        counts = plan.num_draft_tokens or [0] * len(plan.rows)
        for row, scheduled, num_drafts, taken in zip(
            plan.rows, plan.num_scheduled_tokens, counts, result.num_sampled, strict=True
        ):
            self.computed[row] += scheduled - (num_drafts - (taken - 1) if taken else 0)
            self.lengths[row] += taken

    # -- blocks

    def _can_grow(self, row: int, count: int) -> bool:
        end = self.lengths[row] + count
        return end <= self.runner.capacity.max_model_len and len(self._free) >= len(self.lengths) * (count // BLOCK + 2)

    def _grow(self, row: int, length: int) -> list[int]:
        needed = -(-length // BLOCK) - len(self.blocks[row])
        new = [self._free.pop() for _ in range(needed)]
        self.blocks[row] += new
        return new

    def _make_room(self, count: int, length: int) -> None:
        """By dropping rows, the oldest first."""
        needed = count * (-(-length // BLOCK) + 1)
        rows = list(self.lengths)
        most = self.runner.capacity.max_num_seqs - count
        while rows and (len(self._free) < needed or len(self.lengths) > most):
            self._drop([rows.pop(0)])

    def _drop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._free += self.blocks.pop(row)
            del self.lengths[row], self.computed[row]
        self.released += rows


def soak_settings(directory: Path, device: Literal["cpu", "cuda"], **changes: Any) -> Settings:
    own = {
        "model": str(directory), "load_format": "dummy", "device": device, "kernels": "torch", "block_size": BLOCK,
        "max_num_seqs": 256, "max_num_batched_tokens": 8192, "draft": "ngram", "max_num_draft_tokens": 8,
    }  # fmt: skip
    return Settings.of(**own | changes)


def run_soak(settings: Settings, seconds: float) -> Soak:
    """Raises what a step raises: torch's out-of-memory error above all."""
    budget, drafts = settings.scheduling.max_num_batched_tokens, settings.speculation.max_num_draft_tokens
    soak = Soak(load_runner(settings, has_windows=False), budget, drafts)
    soak.run(seconds)
    return soak


def taken_share() -> float:
    """Of the card's memory, all that is not free: nothing else should run on it."""
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


def soaked(directory: Path, seconds: float) -> tuple[float, float, int]:
    """The share of the card that was asked for, the one that is taken in the end, and steps."""
    settings = soak_settings(directory, "cuda")
    soak = run_soak(settings, seconds)
    return settings.memory.gpu_memory_utilization, taken_share(), soak.step_id
