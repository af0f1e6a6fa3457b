"""What steps of models take by themselves: the target's, and a draft's guesses, without messages between services.

    python -m scripts.bench.speculation.costs target|draft --model DIR --threads 0 --drafts 0,1,2,4,8

Prints JSON: the number of draft tokens -> seconds, medians, for a lone sequence.  `target`: a step that yields a token
and verifies so many draft tokens.  `draft`: from an update with one token that was not guessed to so many guesses.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Protocol

import structlog

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.plans import BLOCK, PlanMaker
from services.draft.load import load_proposer
from services.draft.proposer import Proposer
from services.draft.session import DraftSession
from shared.config import Settings
from shared.messages import AdmittedSequence, DraftUpdate, StepPlan
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

ROUNDS, STEPS = 5, 40
PROMPT, NUM_BLOCKS, ROW = 64, 64, 0
PLAIN = 0

Costs = dict[int, float]  # draft tokens -> seconds of a step


class Lone(Protocol):
    """One sequence whose steps can be timed."""

    def begin(self) -> None:
        """Another sequence, its prompt computed."""

    def step(self, num_drafts: int) -> float:
        """Seconds of a step with so many draft tokens."""


class LoneRow:
    """One greedy sequence in a runner, whose draft tokens are drawn at random."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plans = PlanMaker(runner, NUM_BLOCKS * BLOCK - PROMPT)
        self._computed = 0

    def begin(self) -> None:
        self._runner.reset()
        self._computed = 0
        self._run(self._plans.admit([ROW], PROMPT), 0)

    def step(self, num_drafts: int) -> float:
        return self._run(self._plans.decode([ROW], self._computed, num_drafts), num_drafts)

    def _run(self, plan: StepPlan, num_drafts: int) -> float:
        begin = time.perf_counter()
        result = self._runner.run(plan)
        seconds = time.perf_counter() - begin
        self._computed += plan.num_scheduled_tokens[0] - num_drafts + result.num_sampled[0] - 1
        return seconds


class LoneGuesses:
    """One greedy sequence, of which the draft is told tokens drawn at random."""

    def __init__(self, proposer: Proposer) -> None:
        self._session = DraftSession(proposer)
        self._vocab_size = proposer.capacity.vocab_size
        self._rng = random.Random(1)
        self._num_updates = self._num_told = 0

    def begin(self) -> None:
        prompt = pack_tokens([self._draw() for _ in range(PROMPT)])
        params = SamplingParams(temperature=0.0, max_tokens=PROMPT * 8, ignore_eos=True)
        self._num_told = PROMPT
        self._ask(1, [AdmittedSequence(ROW, prompt, PROMPT, params, 0, [])])

    def step(self, num_drafts: int) -> float:
        return self._ask(num_drafts, [])

    def _ask(self, num_drafts: int, opened: list[AdmittedSequence]) -> float:
        self._num_updates += 1
        update = DraftUpdate(
            epoch=1, update_id=self._num_updates, closed_rows=[], opened=opened, rows=[ROW],
            num_tokens=[self._num_told], num_new=[1], new_token_ids=[self._draw()], num_wanted=[num_drafts],
        )  # fmt: skip
        begin = time.perf_counter()
        self._session.apply(update)
        while not self._session.is_idle:
            self._session.turn()
        self._num_told += 1
        return time.perf_counter() - begin

    def _draw(self) -> int:
        return self._rng.randrange(self._vocab_size)


def measure_in_turns(row: Lone, drafts: list[int]) -> Costs:
    """The kinds of step in turn, in several rounds, each kind in a sequence of its own."""
    taken: dict[int, list[float]] = {number: [] for number in drafts}
    for _ in range(ROUNDS):
        for number in drafts:
            row.begin()
            taken[number].append(median(row.step(number) for _ in range(STEPS)))
    return {number: median(times) for number, times in taken.items()}


def costs_of(role: str, model: Path, *, num_threads: int, drafts: list[int]) -> Costs:
    """Measured in a process of its own, as the worker's and the draft's are."""
    options = ["--model", str(model), "--threads", str(num_threads), "--drafts", ",".join(map(str, drafts))]
    command = [sys.executable, "-m", __name__, role, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {int(number): seconds for number, seconds in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["target", "draft"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: one per core")
    parser.add_argument("--drafts", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2, 4, 8])
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if args.role == "draft":
        settings = Settings.of(model=args.model, draft=args.model, draft_num_threads=args.threads)
        row: Lone = LoneGuesses(load_proposer(settings))
    else:
        settings = Settings.of(model=args.model, num_threads=args.threads, num_blocks=NUM_BLOCKS, max_model_len=1024)
        row = LoneRow(load_runner(settings, has_windows=False))
    print(json.dumps(measure_in_turns(row, args.drafts)))


if __name__ == "__main__":
    main()
