"""`pageant bench messages`: encoding and decoding of every hop of one step, in processor time.

The messages are real ones: a scheduler's core plans and takes a result in, a detokenizer's table turns the token batch
into a text batch.  Each hop is one message from the sender's encoder to the receiver's decoder of its whole inbox.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time
from timeit import repeat
from typing import Any

from services.cli.display.tables import aligned
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import (
    AddRequest,
    DetokenizerInbox,
    GatewayInbox,
    LatencyBreakdown,
    Message,
    MessageDecoder,
    RequestHeader,
    SchedulerInbox,
    StepPlan,
    StepResult,
    TextBatch,
    WorkerCapacity,
    WorkerInbox,
    encode,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.text.tokenization import load_tokenizer
from shared.tracing.phases import NUM_PHASES

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
VOCAB = 4096
PROMPT = 128  # tokens and a few more, so that block boundaries do not fall together
WORKER = "worker"
DETOKENIZER = "detokenizer"
WARM_STEPS = 30


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


Hop = tuple[str, Message, Any]


def hops_of_a_step(num_sequences: int, model: Path) -> list[Hop]:
    """One steady step's messages, with the union that each receiver decodes."""
    decoding = Decoding(num_sequences)
    table = StreamTable(DecoderFactory(load_tokenizer(model)))
    hops: list[Hop] = []
    for _ in range(WARM_STEPS):
        plan = decoding.plan()
        assert plan is not None
        result = decoding.answer(plan)
        decoding.core.apply(WORKER, result)
        tokens = decoding.core.outbound.take_batches()[DETOKENIZER]
        table.apply(tokens)
        (sequences,) = table.take_texts().values()
        texts = TextBatch(sequences)
        hops = [
            ("plan", plan, WorkerInbox),
            ("result", result, SchedulerInbox),
            ("token batch", tokens, DetokenizerInbox),
            ("text batch", texts, GatewayInbox),
        ]
    return hops


def cost(work: Any, repeats: int = 200, rounds: int = 9) -> float:
    """Microseconds of one call: the median round."""
    times = repeat(work, gc.enable, timer=process_time, number=repeats, repeat=rounds)
    return 1e6 * median(times) / repeats


def measure(hop: Hop) -> tuple[float, float, int]:
    """(encode, decode) in microseconds, and bytes on the wire."""
    _, message, union = hop
    decoder, data = MessageDecoder[Any](union), encode(message)
    assert decoder.decode(data) == message
    return cost(lambda: encode(message)), cost(lambda: decoder.decode(data)), len(data)


def table(sizes: Sequence[int], model: Path) -> str:
    """One row per hop and size, and one for all hops."""
    rows = []
    for size in sizes:
        measured = {hop[0]: measure(hop) for hop in hops_of_a_step(size, model)}
        encoding, decoding, num_bytes = (sum(column) for column in zip(*measured.values(), strict=True))
        measured["all hops"] = encoding, decoding, int(num_bytes)
        for name, (encoding, decoding, num_bytes) in measured.items():
            rows.append((name, str(size), f"{encoding:.1f}", f"{decoding:.1f}", f"{num_bytes:,}"))
    return aligned(("message", "sequences", "encode, us", "decode, us", "bytes"), rows)
