"""What steps of a model take by themselves: decoding one sequence, and verifying so many draft tokens of it.

    python -m scripts.bench.speculation.cost --model DIR --threads 0 --drafts 0,1,2,4,8

Prints JSON: the number of draft tokens -> seconds of a step, medians.  The model runner alone, without messages.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Protocol

import structlog

from engine.execution.loading import load_runner
from engine.execution.runner import ModelRunner
from shared.config import Settings
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

ROUNDS, STEPS = 5, 40
PROMPT, BLOCK, NUM_BLOCKS = 64, 16, 64
PLAIN = 0

Costs = dict[int, float]  # draft tokens verified -> seconds of a step


class LoneRow:
    """One greedy sequence in a runner, whose draft tokens are drawn at random."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rng = random.Random(1)
        self._step_id = 0
        self._computed = 0

    def begin(self) -> None:
        """Another sequence, its prompt computed, with all the blocks that there are."""
        self._runner.reset()
        self._computed = 0
        prompt = pack_tokens([self._draw() for _ in range(PROMPT)])
        params = SamplingParams(temperature=0.0, max_tokens=NUM_BLOCKS * BLOCK - PROMPT, ignore_eos=True)
        self._run(PROMPT, 0, [AdmittedSequence(0, prompt, PROMPT, params, 0, [])])

    def step(self, num_drafts: int) -> float:
        """Seconds of a step that yields a token, and verifies so many."""
        return self._run(1 + num_drafts, num_drafts, [])

    def _run(self, scheduled: int, num_drafts: int, admitted: list[AdmittedSequence]) -> float:
        self._step_id += 1
        plan = StepPlan(
            epoch=1,
            step_id=self._step_id,
            admitted=admitted,
            rows=[0],
            num_computed_tokens=[self._computed],
            num_scheduled_tokens=[scheduled],
            num_new_blocks=[NUM_BLOCKS if admitted else 0],
            new_block_ids=list(range(NUM_BLOCKS)) if admitted else [],
            block_copies=[],
            released_rows=[],
            num_draft_tokens=[num_drafts] if num_drafts else [],
            draft_token_ids=[self._draw() for _ in range(num_drafts)],
        )
        begin = time.perf_counter()
        result = self._runner.run(plan)
        seconds = time.perf_counter() - begin
        self._computed += scheduled - num_drafts + result.num_sampled[0] - 1
        return seconds

    def _draw(self) -> int:
        return self._rng.randrange(self._runner.capacity.vocab_size)


class Lone(Protocol):
    """One sequence whose steps can be timed."""

    def begin(self) -> None: ...

    def step(self, num_drafts: int) -> float: ...


def measure(model: str, num_threads: int, drafts: list[int]) -> Costs:
    settings = Settings.of(model=model, num_threads=num_threads, num_blocks=NUM_BLOCKS, max_model_len=1024)
    return measure_in_turns(LoneRow(load_runner(settings)), drafts)


def measure_in_turns(row: Lone, drafts: list[int]) -> Costs:
    """The kinds of step in turn, in several rounds, each kind in a sequence of its own."""
    taken: dict[int, list[float]] = {number: [] for number in drafts}
    for _ in range(ROUNDS):
        for number in drafts:
            row.begin()
            taken[number].append(median(row.step(number) for _ in range(STEPS)))
    return {number: median(times) for number, times in taken.items()}


def costs_of(model: Path, *, num_threads: int, drafts: list[int], module: str = __name__) -> Costs:
    """What `module` measures, in a process of its own, as the worker's and the draft's are."""
    options = ["--model", str(model), "--threads", str(num_threads), "--drafts", ",".join(map(str, drafts))]
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {int(number): seconds for number, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


def run(measure: Callable[[str, int, list[int]], Costs], description: str | None) -> None:
    """The program around one kind of measurement."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: one per core")
    parser.add_argument("--drafts", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2, 4, 8])
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    print(json.dumps(measure(args.model, args.threads, args.drafts)))


if __name__ == "__main__":
    run(measure, __doc__)
