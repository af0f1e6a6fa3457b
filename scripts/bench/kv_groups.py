"""The KV cache of a sequence and how many sequences fit, of a model most of whose layers see a window only.

    scripts/bench_kv_groups [--check] [--tokens 8192] [--memory 1]

The model has the shape of Gemma 3 1B: of 26 layers, every sixth sees all tokens and the others the last 512.  Its cache
is divided into pools as a worker does it, and the scheduler's core plans for it, once with pools for the windows and
once with one pool for all layers; no model runs.  What a sequence holds is read from the core's tables when it has all
its tokens, and what fits is the most sequences of that length that ran at once, prompts of which no two begin alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from engine.description.reading import read_config
from engine.description.spec import ModelSpec
from engine.loading.memory import GIB, MemoryPlan, block_bytes, plan_memory
from engine.modeling.kv_pool import KVLayout
from scripts.bench.common.report import Result, bench_parser, finish
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from shared.config import Settings
from shared.messages import AddRequest, RequestHeader, SlidingPool, StepPlan, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams

VOCAB_SIZE = 262144
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": VOCAB_SIZE, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}  # fmt: skip
WORKER, NUM_OUTPUT, SHORT = "w0", 8, 512  # tokens that are generated of each; tokens of a short sequence
LEAST_SHARE, LEAST_MORE = 0.25, 3.0  # of the bytes with one pool; times the sequences


@dataclass(frozen=True)
class HeldKV:
    num_bytes: int  # that one sequence holds
    num_running: int  # at once, with all their tokens


def describe() -> ModelSpec:
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        return read_config(Path(directory))


def divide(spec: ModelSpec, settings: Settings, windows: tuple[int, ...]) -> MemoryPlan:
    layout = KVLayout(spec.attentions, torch.bfloat16, torch.device("cpu"))
    first, sliding = block_bytes(spec, layout.layer_bytes(settings.memory.block_size), windows)
    return plan_memory(
        settings.memory,
        settings.scheduling,
        bytes_per_block=first,
        budget=settings.memory.kv_cache_memory,
        max_model_len=spec.max_position_embeddings,
        sliding=sliding,
    )


def serve(plan: MemoryPlan, settings: Settings, length: int, num_requests: int) -> HeldKV:
    """Sequences of this length that all want to run at once."""
    core = Scheduler(Policy(max_num_queued_tokens=1 << 40))
    sliding = [SlidingPool(*one) for one in plan.windows]
    capacity = WorkerCapacity(
        plan.num_blocks, plan.block_size, settings.scheduling.max_num_seqs, plan.max_model_len, VOCAB_SIZE,
        "gemma-3-1b", "bfloat16", "cpu", sliding=sliding,
    )  # fmt: skip
    core.add_worker(WORKER, 1, capacity)
    core.set_detokenizers(["d0"])
    params = SamplingParams(temperature=0.0, max_tokens=1 << 14, ignore_eos=True, seed=0)
    params = params.resolved(GenerationDefaults(), max_tokens=16)
    for index in range(num_requests):
        prompt = [1 + (index * 7919 + place) % 100_000 for place in range(length - NUM_OUTPUT)]
        core.add(AddRequest(RequestHeader(f"r{index}", "g0"), params, pack_tokens(prompt), [0]), now=0.0)
    replica, most = core.replicas[WORKER], HeldKV(0, 0)
    while core.counters.num_preemptions == 0 and (step_plan := core.schedule(WORKER, 0.0)):
        core.apply(WORKER, answer(replica, step_plan), 0.0)
        core.outbound.take_batches()
        core.journal.take()
        whole = [sequence for sequence in replica.running if sequence.num_computed_tokens >= length]
        if len(whole) > most.num_running:
            most = HeldKV(held(plan, replica) // len(replica.running), len(whole))
        if whole and len(whole) == num_requests:
            break
    return most


def answer(replica: Replica, plan: StepPlan) -> StepResult:
    counts = replica.in_flight[0].num_samples
    return StepResult(plan.epoch, plan.step_id, list(counts), [7] * sum(counts))


def held(plan: MemoryPlan, replica: Replica) -> int:
    """Bytes of all sequences."""
    sizes = [plan.bytes_per_block, *(one.bytes_per_block for one in plan.sliding)]
    return sum(pool.num_held * size for pool, size in zip(replica.pools, sizes, strict=True))


def measure(length: int, gibibytes: float) -> list[Result]:
    settings = Settings.of(kv_cache_memory=int(gibibytes * GIB), max_num_seqs=512)
    spec = describe()
    windows = spec.windows(spec.max_position_embeddings)
    one, several = (divide(spec, settings, seen) for seen in ((), windows))
    print(f"one pool: {one}\npools for windows: {several}")
    lone = [serve(plan, settings, length, 1).num_bytes for plan in (one, several)]
    fit = [serve(plan, settings, length, 2 * several.num_tokens // length).num_running for plan in (one, several)]
    short = [serve(plan, settings, SHORT, 2 * one.num_tokens // SHORT).num_running for plan in (one, several)]
    name = f"{length:,} tokens"
    return [
        Result(f"KV cache of a sequence of {name}, one pool", lone[0] / 2**20, "MiB"),
        Result(f"KV cache of a sequence of {name}, pools for windows", lone[1] / 2**20, "MiB"),
        Result("the second of the first", lone[1] / lone[0], "", at_most=LEAST_SHARE),
        Result(f"sequences of {name} in {gibibytes:g} GiB, one pool", fit[0]),
        Result(f"sequences of {name} in {gibibytes:g} GiB, pools for windows", fit[1]),
        Result("the second of the first", fit[1] / fit[0], "x", at_least=LEAST_MORE),
        Result(f"sequences of {SHORT} tokens in {gibibytes:g} GiB, one pool", short[0]),
        Result(f"sequences of {SHORT} tokens in {gibibytes:g} GiB, pools for windows", short[1]),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--memory", type=float, default=1.0, help="GiB of KV cache")
    args = parser.parse_args()
    lines = measure(args.tokens, args.memory)
    return finish(lines, check=args.check, title="layers that see a window: bytes of a sequence, sequences that fit")
