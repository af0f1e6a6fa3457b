"""Steps of the model runner with random weights, planned by the scheduler's core in the same process."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from typing import Literal

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.core import CoreStep, asked, core_of, steps
from services.scheduler.state.policy import Policy
from shared.config import Settings

BLOCK: Literal[16] = 16  # tokens
CHUNK = 8192  # tokens of prompts in one step
NUM_STEPS = 40


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
        found = [
            step for step in run_all(self.runner, num_seqs, context, num_output, CHUNK)
            if step.plan.num_scheduled_tokens == [1] * num_seqs
        ][2:]  # fmt: skip
        device = median(step.result.device_time for step in found)
        return device, (found[-1].end - found[0].end) / (len(found) - 1)

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt in one step, the median of three."""
        return median(run_all(self.runner, 1, num_tokens, 1, CHUNK)[0].result.device_time for _ in range(3))


def offline_throughput(
    runner: ModelRunner, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> float:
    """Output tokens per second of as many random prompts, given at once; all run to `num_output` tokens.

    What processes, sockets and gRPC are held against, with the same plans.
    """
    found = run_all(runner, num_prompts, num_input, num_output, max_num_batched_tokens)
    num_tokens = sum(len(step.result.sampled_token_ids) for step in found)
    if num_tokens != num_prompts * num_output:
        raise RuntimeError(f"{num_tokens} tokens came out, not {num_prompts} x {num_output}")
    return num_tokens / (found[-1].end - found[0].begin)


def run_all(
    runner: ModelRunner, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> list[CoreStep]:
    """The steps of greedy requests that are given at once."""
    runner.reset()
    policy = Policy(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False)
    core = core_of(runner.capacity, policy)
    rng, vocabulary = random.Random(1), range(runner.capacity.vocab_size)
    for index in range(num_prompts):
        core.add(asked(f"r{index}", rng.choices(vocabulary, k=num_input), max_tokens=num_output), now=0.0)
    return list(steps(core, runner))
