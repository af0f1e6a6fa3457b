"""What the chain of processes adds to the first token of a lone request."""

from __future__ import annotations

import asyncio
from statistics import median
from time import perf_counter
from typing import Any

import grpc
import uvloop

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.clients import ask
from scripts.bench.report import Result
from scripts.bench.tokens import Speech
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, RequestHeader, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

NUM_REQUESTS = 200
NUM_TOKENS = 4
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # its stubs lack it
PAUSE = 0.01  # seconds between requests of a client that takes its time: caches are cold and processors asleep


def added_to_first_token(address: str, *, at_most: float) -> list[Result]:
    """Milliseconds: the first token through processes whose worker takes no time, less the same work in this one.

    At concurrency 1, each request after the other's end; and for information the same after a pause.
    """
    alone = 1000 * median(in_process(Speech()))
    lines = []
    for what, pause, bound in (
        ("at concurrency 1", 0.0, at_most),
        (f"after {1000 * PAUSE:.0f} ms of rest", PAUSE, None),
    ):
        chain = 1000 * median(uvloop.run(through_the_chain(address, pause)))
        note = f"{chain:.2f} ms less {alone:.2f} ms in one process"
        lines.append(Result(f"added to the first token {what}", chain - alone, "ms", at_most=bound, note=note))
    return lines


async def through_the_chain(address: str, pause: float) -> list[float]:
    """Seconds to the first message of each of many requests, one at a time."""
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for seed in range(NUM_REQUESTS):
            await asyncio.sleep(pause)
            start = perf_counter()
            call = stub.Generate(ask(seed, NUM_TOKENS))
            await call.read()
            times.append(perf_counter() - start)
            while await call.read() != EOF:
                pass
    return times[NUM_REQUESTS // 10 :]


def in_process(speech: Speech) -> list[float]:
    """Seconds of the work itself: tokenize, schedule, take a token in, detokenize."""
    core, table = Scheduler(Policy()), StreamTable(DecoderFactory(speech.tokenizer))
    core.set_detokenizers(["d"])
    core.add_worker("w", 1, WorkerCapacity(4096, 16, 8, 1024, speech.tokenizer.vocab_size, "m", "float32", "cpu"))
    times = []
    for seed in range(NUM_REQUESTS):
        proto = ask(seed, NUM_TOKENS)
        start = perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
        prompt = pack_tokens(speech.tokenizer.encode(proto.text))
        header = RequestHeader(str(seed), "g")
        core.add(AddRequest(header, params.resolved(GenerationDefaults(), max_tokens=16), prompt, []), 0.0)
        plan = core.schedule("w")
        assert plan is not None
        core.apply("w", StepResult(plan.epoch, plan.step_id, [1], [speech.token(seed, 0)]))
        for batch in core.outbound.take_batches().values():
            table.apply(batch)
        table.take_texts()
        times.append(perf_counter() - start)
        core.abort(header.request_id)
    return times[NUM_REQUESTS // 10 :]
