"""Steps of the model runner with random weights: by plans made by hand, and by the scheduler's in the same process."""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Literal

from engine.execution.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.plans import PlanMaker
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.config import Settings
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

BLOCK: Literal[16] = 16  # tokens
CHUNK = 8192  # tokens of a prompt in one step
NUM_STEPS = 40
WORKER = "offline"
IN_FLIGHT = 2


class Runs:
    """One model on one device."""

    def __init__(self, directory: Path, *, device: str, num_rows: int, max_len: int) -> None:
        settings = Settings.of(
            model=str(directory), load_format="dummy", device=device, kernels="torch", max_num_seqs=num_rows,
            max_num_batched_tokens=max(CHUNK, num_rows), max_model_len=max_len, block_size=BLOCK,
            num_blocks=num_rows * (max_len // BLOCK) if device == "cpu" else 0,
        )  # fmt: skip
        self.runner: ModelRunner = load_runner(settings, has_windows=False)
        self._plans = PlanMaker(self.runner, NUM_STEPS)

    def decode(self, num_seqs: int, context: int) -> tuple[float, float]:
        """Seconds of a step: on the device, and as the host sees them where it launches two ahead."""
        self._fill(num_seqs, context)
        taken, launched = [], []
        begin = time.perf_counter()
        for index in range(NUM_STEPS):
            launched.append(self.runner.launch(self._plans.decode(range(num_seqs), context + index)))
            if len(launched) > 1:
                taken.append(launched.pop(0).finish().device_time)
        taken.append(launched.pop().finish().device_time)
        return median(taken[2:]), (time.perf_counter() - begin) / NUM_STEPS

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt in one step, the better half of three."""
        return median(self._fill(1, num_tokens) for _ in range(3))

    def _fill(self, num_seqs: int, context: int) -> float:
        """Prompts, as many at a time as a step takes; seconds of the last of these steps."""
        self.runner.reset()
        per_step, seconds = max(1, CHUNK // context), 0.0
        for first in range(0, num_seqs, per_step):
            rows = range(first, min(first + per_step, num_seqs))
            seconds = self.runner.run(self._plans.admit(rows, context)).device_time
        return seconds


def offline_throughput(
    runner: ModelRunner, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> float:
    """Output tokens per second of as many random prompts, given at once; all run to `num_output` tokens.

    The scheduler's core and the runner in one process, two steps in flight and nothing on a wire: what processes,
    sockets and gRPC are held against, with the same plans.
    """
    runner.reset()
    core = _core_with(runner, max_num_batched_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    params = params.resolved(GenerationDefaults(), max_tokens=num_output)
    rng, vocabulary = random.Random(1), range(runner.capacity.vocab_size)
    for index in range(num_prompts):
        prompt = rng.choices(vocabulary, k=num_input)
        core.add(AddRequest(RequestHeader(f"r{index}", "g"), params, pack_tokens(prompt), [0]), now=0.0)
    begin = time.perf_counter()
    num_tokens = _run(core, runner)
    if num_tokens != num_prompts * num_output:
        raise RuntimeError(f"{num_tokens} tokens came out, not {num_prompts} x {num_output}")
    return num_tokens / (time.perf_counter() - begin)


def _core_with(runner: ModelRunner, max_num_batched_tokens: int) -> Scheduler:
    core = Scheduler(Policy(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False))
    core.set_detokenizers(["detokenizer"])
    core.add_worker(WORKER, 1, runner.capacity)
    return core


def _run(core: Scheduler, runner: ModelRunner) -> int:
    """Until nothing is left to plan; the tokens that came out."""
    launched: deque[PendingResult] = deque()
    num_tokens = 0
    while True:
        while len(launched) < IN_FLIGHT and (plan := core.schedule(WORKER, time.perf_counter())) is not None:
            launched.append(runner.launch(plan))
        if not launched:
            return num_tokens
        core.apply(WORKER, launched.popleft().finish(), time.perf_counter())
        for batch in core.outbound.take_batches().values():
            num_tokens += sum(len(sequence.token_ids) for sequence in batch.sequences)
