"""A worker process without a model: the real actor and step link, and a runner that takes a fixed time per step.

python -m scripts.bench.common.standin --step-ms 25
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any, cast

from scripts.bench.common.tokens import Speech
from services.worker.actor import WorkerActor
from services.worker.plans.steps import StepComputation, Steps, ThreadSteps
from shared.actor import run_actor
from shared.block_digest import digest_blocks
from shared.config import Settings
from shared.messages import StepPlan, StepResult, Tick, WorkerCapacity
from shared.packing import unpack_tokens
from shared.transport import Transport

MAX_MODEL_LEN = 1024
TOKENS_PER_SEQUENCE = 256  # of the pool: soon all of it is in the prefix cache, which does not grow then


class StandIn:
    """What a model runner is to its step thread: rows are known by their seeds, and how far each is."""

    def __init__(self, settings: Settings, step_seconds: float) -> None:
        self._speech = Speech()
        self._step_seconds = step_seconds
        self._rows: dict[int, tuple[int, int, int]] = {}  # row -> seed; tokens of the prompt, and at admission
        self._blocks: dict[int, tuple[list[int], list[int]]] = {}  # row -> blocks, their generations
        self.fingerprint, self.no_native, self.adapters, self.blocks = None, "", None, None
        block_size, max_num_seqs = settings.memory.block_size, settings.scheduling.max_num_seqs
        self.capacity = WorkerCapacity(
            num_blocks=max(MAX_MODEL_LEN, max_num_seqs * TOKENS_PER_SEQUENCE) // block_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._speech.tokenizer.vocab_size,
            model="stand-in",
            dtype="float32",
            device="cpu",
        )

    def reset(self) -> None:
        self._rows.clear()
        self._blocks.clear()

    def holdings(self) -> tuple[list[int], list[int]]:
        rows = sorted(self._blocks)
        return rows, [digest_blocks(*self._blocks[row]) for row in rows]

    def run(self, plan: StepPlan) -> StepResult:
        """Sleeps for what is left of the step's time once its tokens are there."""
        start = time.perf_counter()
        for row in plan.released_rows:
            self._blocks.pop(row, None)
        for new in plan.admitted:
            self._rows[new.row] = new.seed, new.num_prompt_tokens, len(unpack_tokens(new.token_ids))
            self._blocks[new.row] = [], []
        self._extend(plan)
        num_sampled, tokens = [], []
        columns = zip(plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        for row, computed, scheduled in columns:
            seed, num_prompt, num_known = self._rows[row]
            samples = computed + scheduled >= num_known  # or else it is a chunk of what was known before
            num_sampled.append(int(samples))
            if samples:
                tokens.append(self._speech.token(seed, computed + scheduled - num_prompt))
        if (left := start + self._step_seconds - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult(plan.epoch, plan.step_id, num_sampled, tokens)

    def _extend(self, plan: StepPlan) -> None:
        begin = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            for held, new in zip(self._blocks[row], (plan.new_block_ids, plan.new_block_generations), strict=True):
                held += new[begin : begin + count]
            begin += count


def make(transport: Transport, settings: Settings, step_seconds: float) -> WorkerActor:
    """The real actor around a stand-in."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon_threadsafe(actor.post, Tick())

    def steps(runner: Any, transport: Transport) -> Steps:
        return ThreadSteps(StepComputation(runner), transport, on_failure=wake)

    actor = WorkerActor(transport, settings, lambda: cast(Any, StandIn(settings, step_seconds)), steps)
    return actor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, required=True)
    step_seconds = parser.parse_args().step_ms / 1000
    status: int = run_actor(lambda transport, settings: make(transport, settings, step_seconds))
    if "torch" in sys.modules:
        raise SystemExit("the stand-in has loaded torch: its figures would not be those of the chain alone")
    return status


if __name__ == "__main__":
    sys.exit(main())
