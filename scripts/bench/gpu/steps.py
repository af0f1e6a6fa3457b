"""Steps of the model runner with random weights, planned by the scheduler's core in the same process."""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from engine.execution.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from services.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from services.scheduler.state.policy import Policy
from shared.config import Settings
from shared.messages import AddRequest, RequestHeader, StepPlan
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

BLOCK: Literal[16] = 16  # tokens
CHUNK = 8192  # tokens of prompts in one step
NUM_STEPS = 40
WORKER = "offline"


class TimedStep(NamedTuple):
    """What one step computed and took."""

    plan: StepPlan
    num_tokens: int  # that came out
    device: float  # seconds
    begin: float  # time.perf_counter, when the host launched it
    end: float  # and had its result


class Runs:
    """One model on one device; `early` is `programmatic_launch`."""

    def __init__(self, directory: Path, *, device: str, num_rows: int, max_len: int, early: bool = False) -> None:
        settings = Settings.of(
            model=str(directory), load_format="dummy", device=device, kernels="torch", max_num_seqs=num_rows,
            max_num_batched_tokens=max(CHUNK, num_rows), max_model_len=max_len, block_size=BLOCK,
            programmatic_launch=early, num_blocks=num_rows * (max_len // BLOCK) if device == "cpu" else 0,
        )  # fmt: skip
        self.runner: ModelRunner = load_runner(settings, has_windows=False)

    def decode(self, num_seqs: int, context: int) -> tuple[float, float]:
        """Seconds of a step: on the device, and as the host sees them where it launches two ahead."""
        num_output = NUM_STEPS + num_seqs * context // CHUNK + 3  # those that are in first go on meanwhile
        steps = [
            step for step in run_all(self.runner, num_seqs, context, num_output, CHUNK)
            if step.plan.num_scheduled_tokens == [1] * num_seqs
        ][2:]  # fmt: skip
        return median(step.device for step in steps), (steps[-1].end - steps[0].end) / (len(steps) - 1)

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt in one step, the median of three."""
        return median(run_all(self.runner, 1, num_tokens, 1, CHUNK)[0].device for _ in range(3))


def offline_throughput(
    runner: ModelRunner, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> float:
    """Output tokens per second of as many random prompts, given at once; all run to `num_output` tokens.

    What processes, sockets and gRPC are held against, with the same plans.
    """
    steps = run_all(runner, num_prompts, num_input, num_output, max_num_batched_tokens)
    num_tokens = sum(step.num_tokens for step in steps)
    if num_tokens != num_prompts * num_output:
        raise RuntimeError(f"{num_tokens} tokens came out, not {num_prompts} x {num_output}")
    return num_tokens / (steps[-1].end - steps[0].begin)


def run_all(
    runner: ModelRunner, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> list[TimedStep]:
    """The steps of greedy requests that are given at once, two in flight and nothing on a wire."""
    runner.reset()
    core = Scheduler(Policy(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False))
    core.set_detokenizers(["detokenizer"])
    core.add_worker(WORKER, 1, runner.capacity)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    params = params.resolved(GenerationDefaults(), max_tokens=num_output)
    rng, vocabulary = random.Random(1), range(runner.capacity.vocab_size)
    for index in range(num_prompts):
        prompt = rng.choices(vocabulary, k=num_input)
        core.add(AddRequest(RequestHeader(f"r{index}", "g"), params, pack_tokens(prompt), [0]), now=0.0)
    launched: deque[tuple[StepPlan, PendingResult, float]] = deque()
    steps: list[TimedStep] = []
    while True:
        while len(launched) < MAX_STEPS_IN_FLIGHT and (plan := core.schedule(WORKER, time.perf_counter())) is not None:
            begin = time.perf_counter()
            launched.append((plan, runner.launch(plan), begin))
        if not launched:
            return steps
        plan, pending, begin = launched.popleft()
        result = pending.finish()
        core.apply(WORKER, result, time.perf_counter())
        batches = core.outbound.take_batches().values()
        num_tokens = sum(len(sequence.token_ids) for batch in batches for sequence in batch.sequences)
        steps.append(TimedStep(plan, num_tokens, result.device_time, begin, time.perf_counter()))
