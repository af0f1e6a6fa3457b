"""The scheduler's core and a model runner in one process, with two steps in flight and nothing on a wire.

What processes, sockets and gRPC are held against: the same load, the same plans.
"""

from __future__ import annotations

import random
import time
from collections import deque

from engine.execution.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

WORKER = "offline"
IN_FLIGHT = 2


def offline_throughput(
    runner: ModelRunner, *, num_prompts: int, num_input: int, num_output: int, max_num_batched_tokens: int
) -> float:
    """Output tokens per second of as many random prompts, given at once; all run to `num_output` tokens."""
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
