"""What the card does at best, and the attention kernel alone: beside others where installed, over launch settings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.interface import AttentionShape
from kernels.ops.attention.kv_cache import KVCache
from kernels.provider import triton_kernels
from scripts.bench.gpu.shapes import GpuModelShape

BLOCK = 16  # tokens
SETTINGS = list(product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)))  # keys, warps, stages

COPY_BYTES = 4 << 30
MATRIX = 8192
ROUNDS = 20


def seconds(run: Callable[[], object], *, rounds: int = ROUNDS, warmups: int = 3) -> float:
    """The median time of what `run` launches, between events on the device."""
    for _ in range(warmups):
        run()
    taken = []
    for _ in range(rounds):
        make: Callable[..., Any] = torch.cuda.Event
        begin, end = (make(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1000)
    return median(taken)


def seconds_in_graph(run: Callable[[], object], *, repeats: int = 8) -> float:
    """The time of what `run` launches where it is replayed, as in a step: without what the host needs to launch it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return seconds(graph.replay) / repeats


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16, of random numbers."""
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / seconds(lambda: left @ right)


class Problem:
    """Decodes of equally long sequences, whose blocks lie anywhere."""

    def __init__(self, shape: GpuModelShape, num_seqs: int, context: int, device: str) -> None:
        self.shape, self.num_seqs, self.context = shape, num_seqs, context
        per_seq = -(-context // BLOCK)
        size = (num_seqs * per_seq, BLOCK, shape.num_key_value_heads, shape.head_dim)
        dtype = torch.bfloat16
        self.cache = KVCache(*(torch.randn(size, device=device, dtype=dtype) for _ in range(2)))
        self.tables = torch.randperm(num_seqs * per_seq, device=device).view(num_seqs, per_seq)
        self.query = torch.randn(num_seqs, shape.num_attention_heads, shape.head_dim, device=device, dtype=dtype)

    def triton(self) -> Callable[[], Tensor]:
        shape = self.shape
        known = AttentionShape(
            ((shape.num_attention_heads // shape.num_key_value_heads, shape.head_dim),), self.context
        )
        kernels = triton_kernels(known)
        ones, lengths = [1] * self.num_seqs, [self.context] * self.num_seqs
        plan = kernels.plan_attention(ones, lengths, self.tables, BLOCK, [0])
        scale = shape.head_dim**-0.5
        return lambda: kernels.paged_attention(self.query, self.cache, plan, scale, 0)

    def flashinfer(self) -> Callable[[], Tensor] | None:
        """None where it is not installed."""
        if find_spec("flashinfer") is None:
            return None
        flashinfer = import_module("flashinfer")
        shape, per_seq = self.shape, self.tables.shape[1]
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device="cuda") * per_seq
        last = torch.full((self.num_seqs,), (self.context - 1) % BLOCK + 1, dtype=torch.int32, device="cuda")
        heads = shape.num_attention_heads, shape.num_key_value_heads
        wrapper.plan(
            starts, self.tables.flatten().int(), last, *heads, shape.head_dim, BLOCK,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        run: Callable[..., Tensor] = wrapper.run
        return lambda: run(self.query, (self.cache.keys, self.cache.values))


def tune(problem: Problem) -> list[tuple[float, tuple[int, int, int]]]:
    """Seconds of each launch setting, the fastest first; those that do not fit the card are left out."""
    from kernels.triton.attention import attention

    found = []
    for setting in SETTINGS:
        with patch.object(attention, "_tuning", lambda *_, setting=setting: setting):
            try:
                found.append((seconds_in_graph(problem.triton()), setting))
            except Exception as error:  # out of shared memory, in as many words as triton has versions
                print(f"keys, warps, stages {setting}: {type(error).__name__}", flush=True)
    return sorted(found)
