"""The KV cache of a sequence and how many sequences fit, of a model most of whose layers see a window only.

The model has the shape of Gemma 3 1B: of 26 layers, every sixth sees all tokens and the others the last 512.  Its cache
is divided into pools as a worker does it, and the scheduler's core plans for it, once with pools for the windows and
once with one pool for all layers; no model runs.  What a sequence holds is read from the core's tables when it has all
its tokens, and what fits is the most sequences of that length that ran at once, prompts of which no two begin alike.
docs/measurements/kv-groups.md has the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.description.reading import read_config
from engine.loading.memory import GIB, MemoryPlan, block_bytes, plan_memory
from engine.modeling.kv_pool import KVLayout
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from shared.config import Settings
from shared.messages import AddRequest, RequestHeader, SlidingPool, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams

VOCAB_SIZE = 262144
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": VOCAB_SIZE, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SETTINGS = Settings.of(kv_cache_memory=GIB, max_num_seqs=512)
WORKER, NUM_OUTPUT = "w0", 8  # tokens that are generated of each
LONG, SHORT = 8192, 512  # tokens of a sequence


class HeldKV(NamedTuple):
    num_bytes: int  # that one sequence holds
    num_running: int  # at once, with all their tokens


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryPlan, MemoryPlan]:
    """With one pool, and with pools for the windows."""
    directory: Path = tmp_path_factory.mktemp("gemma")
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    spec = read_config(directory)
    layer_bytes = KVLayout(spec.attentions, torch.bfloat16, torch.device("cpu")).layer_bytes(SETTINGS.memory.block_size)

    def divide(windows: tuple[int, ...]) -> MemoryPlan:
        first, sliding = block_bytes(spec, layer_bytes, windows)
        return plan_memory(
            SETTINGS.memory,
            SETTINGS.scheduling,
            bytes_per_block=first,
            budget=SETTINGS.memory.kv_cache_memory,
            max_model_len=spec.max_position_embeddings,
            sliding=sliding,
        )

    return divide(()), divide(spec.windows(spec.max_position_embeddings))


def serve(plan: MemoryPlan, length: int, num_requests: int) -> HeldKV:
    """Sequences of this length that all want to run at once."""
    core = Scheduler(Policy(max_num_queued_tokens=1 << 40))
    capacity = WorkerCapacity(
        plan.num_blocks, plan.block_size, SETTINGS.scheduling.max_num_seqs, plan.max_model_len, VOCAB_SIZE,
        "gemma-3-1b", "bfloat16", "cpu", sliding=[SlidingPool(*one) for one in plan.windows],
    )  # fmt: skip
    core.add_worker(WORKER, 1, capacity)
    core.set_detokenizers(["d0"])
    params = SamplingParams(temperature=0.0, max_tokens=1 << 14, ignore_eos=True, seed=0)
    params = params.resolved(GenerationDefaults(), max_tokens=16)
    for index in range(num_requests):
        prompt = [1 + (index * 7919 + place) % 100_000 for place in range(length - NUM_OUTPUT)]
        core.add(AddRequest(RequestHeader(f"r{index}", "g0"), params, pack_tokens(prompt), [0]), now=0.0)
    replica, most = core.replicas[WORKER], HeldKV(0, 0)
    while core.counters.num_preemptions == 0 and (step := core.schedule(WORKER, 0.0)):
        counts = list(replica.in_flight[0].num_samples)
        core.apply(WORKER, StepResult(step.epoch, step.step_id, counts, [7] * sum(counts)), 0.0)
        core.outbound.take_batches()
        core.journal.take()
        whole = [sequence for sequence in replica.running if sequence.num_computed_tokens >= length]
        if len(whole) > most.num_running:
            most = HeldKV(held(plan, replica) // len(replica.running), len(whole))
        if len(whole) == num_requests:
            break
    return most


def held(plan: MemoryPlan, replica: Replica) -> int:
    """Bytes of all sequences."""
    sizes = [plan.bytes_per_block, *(one.bytes_per_block for one in plan.sliding)]
    return sum(pool.num_held * size for pool, size in zip(replica.pools, sizes, strict=True))


def test_a_long_sequence_holds_a_fifth(plans: tuple[MemoryPlan, MemoryPlan]) -> None:
    one, windows = (serve(plan, LONG, 1).num_bytes for plan in plans)
    assert (round(one / 2**20), round(windows / 2**20, 1)) == (208, 43.3)
    assert windows <= one / 4


def test_so_many_fit(plans: tuple[MemoryPlan, MemoryPlan]) -> None:
    """At least three times as many long ones; sequences that fill no window pay for the division with half."""
    one, windows = plans
    assert [serve(plan, LONG, 2 * windows.num_tokens // LONG).num_running for plan in plans] == [4, 18]
    assert [serve(plan, SHORT, 2 * one.num_tokens // SHORT).num_running for plan in plans] == [75, 38]
