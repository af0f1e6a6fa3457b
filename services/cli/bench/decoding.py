"""A scheduler's core in steady state: so many sequences that decode, at a worker that is not there."""

from __future__ import annotations

from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, LatencyBreakdown, RequestHeader, StepPlan, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.phases import NUM_PHASES
from shared.sampling import GenerationDefaults, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
VOCAB = 4096
PROMPT = 128  # tokens and a few more, so that block boundaries do not fall together
WORKER = "worker"
DETOKENIZER = "detokenizer"


class Decoding:
    """`num_sequences` greedy requests, two steps ahead; `answer` stands for the worker."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.core = Scheduler(Policy(max_num_batched_tokens=1 << 20, max_num_queued_reqs=1 << 20))
        blocks = max(num_sequences, 4) * MAX_MODEL_LEN // BLOCK_SIZE // 4
        self.core.add_worker(
            WORKER, 1, WorkerCapacity(blocks, BLOCK_SIZE, num_sequences, MAX_MODEL_LEN, VOCAB, "m", "float32", "cpu")
        )
        self.core.set_detokenizers([DETOKENIZER])
        for index in range(num_sequences):
            self.core.add(request(index), 0.0)
        self._token = 0

    def plan(self) -> StepPlan | None:
        return self.core.schedule(WORKER)

    def answer(self, plan: StepPlan) -> StepResult:
        """One token for each row: any that is no end."""
        self._token = 1 + self._token % (VOCAB - 2)
        count = len(plan.rows)
        return StepResult(plan.epoch, plan.step_id, [1] * count, [self._token] * count)


def request(index: int) -> AddRequest:
    """The request numbered `index`, of which none shares a prefix with another."""
    prompt = [(index * 131 + position * 7) % VOCAB for position in range(PROMPT + index % BLOCK_SIZE)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - 2 * PROMPT, seed=index, ignore_eos=True)
    header = RequestHeader(f"{index:032x}", "ipc:///run/user/1000/pageant/gateway-01234567.sock", f"{index:032x}")
    resolved = params.resolved(GenerationDefaults(), max_tokens=16)
    return AddRequest(header, resolved, pack_tokens(prompt), [0], latency=LatencyBreakdown([0] * NUM_PHASES))
