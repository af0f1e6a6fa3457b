"""`pageant bench kernels`: the operations of one decoder layer at a model's shapes, one by one, by provider."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor

from kernels.cpu.binding.loading import load as load_native
from kernels.cpu.binding.native import Native, NativeUnavailable
from kernels.interface import Kernels
from kernels.ops.attention.kv_cache import KVCache
from kernels.provider import select_kernels
from services.cli.bench.options import KernelOptions
from services.cli.display.tables import aligned
from services.simulator.hardware import DecoderShape, shape_of
from shared.errors import ConfigError

BLOCK_SIZE = 16
MIN_SECONDS = 0.05  # of each timing
ROUNDS = 5
Row = tuple[str, str, str, str, str, str]
Op = tuple[str, int, Callable[[], Any], float, float]  # name, rows, work, floating point operations, bytes read


def table(options: KernelOptions) -> str:
    """One line for each operation, number of rows and provider."""
    try:
        shape = shape_of(options.model)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    rows, device, threads = options.rows, options.device, options.threads
    torch.set_num_threads(threads or os.cpu_count() or 1)
    kind = getattr(torch, options.dtype)
    lines: list[Row] = []
    with torch.inference_mode():
        kernels = select_kernels(torch.device(device), kind)
        held = torch.float32 if device == "cpu" else kind  # torch's kernels on a CPU hold bfloat16's values in float32
        for op in torch_ops(kernels, shape, rows, options.context, torch.device(device), held):
            lines.append(line(kernels.name, op, device))
        if device == "cpu":
            lines += native_lines(shape, rows, kind, threads)
    return aligned(("operation", "provider", "rows", "us", "GFLOP/s", "GB/s"), lines, left=(0, 1))


def line(provider: str, op: Op, device: str) -> Row:
    name, num_rows, work, flops, num_bytes = op
    seconds = seconds_of(work, device)
    gflops, gbytes = (f"{value / seconds / 1e9:.1f}" if value else "" for value in (flops, num_bytes))
    return name, provider, str(num_rows), f"{1e6 * seconds:.1f}", gflops, gbytes


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Of one call: the median round, each long enough for the clock."""
    work()
    repeats = max(1, round(MIN_SECONDS / max(_timed(work, 1, device), 1e-7)))
    return median(_timed(work, repeats, device) for _ in range(ROUNDS))


def _timed(work: Callable[[], Any], repeats: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def linears(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Name -> (out_features, in_features)."""
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return {
        "qkv": (queries + 2 * keys, shape.hidden_size),
        "output": (shape.hidden_size, queries),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }


def torch_ops(
    kernels: Kernels, shape: DecoderShape, rows: Sequence[int], context: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Op]:
    """What the provider bound, at the shapes of one layer and the head."""
    width = dtype.itemsize
    for name, (out, into) in linears(shape).items():
        weight = kernels.pack_linear(torch.randn(out, into, device=device, dtype=dtype))
        for count in rows:
            x = torch.randn(count, into, device=device, dtype=dtype)
            yield linear_op(name, x, partial(kernels.linear, x, weight, None), (out, into), width)
    for count in rows:
        x = torch.randn(count, shape.hidden_size, device=device, dtype=dtype)
        norm = torch.ones(shape.hidden_size, device=device, dtype=dtype)
        gates = torch.randn(count, 2 * shape.intermediate_size, device=device, dtype=dtype)
        yield "rms_norm", count, partial(kernels.rms_norm, x, norm, 1e-5), 0.0, 2.0 * width * x.numel()
        gated = partial(kernels.gated_activation, gates, "silu")
        yield "gated_activation", count, gated, 0.0, 1.5 * width * gates.numel()
    for count in rows:
        yield attention_op(kernels, shape, count, context, device, dtype)


def linear_op(name: str, x: Tensor, work: Callable[[], Tensor], size: tuple[int, int], width: int) -> Op:
    """A product with a weight of this size, `width` bytes each."""
    return name, len(x), work, 2.0 * len(x) * size[0] * size[1], float(width * size[0] * size[1])


def attention_op(
    kernels: Kernels, shape: DecoderShape, count: int, context: int, device: torch.device, dtype: torch.dtype
) -> Op:
    """`count` sequences that decode, `context` keys each, in blocks scattered over the pool."""
    per_row = -(-context // BLOCK_SIZE)
    places = torch.randperm(count * per_row, device=device)
    size = (count * per_row, BLOCK_SIZE, shape.num_key_value_heads, shape.head_dim)
    cache = KVCache(torch.randn(size, device=device, dtype=dtype), torch.randn(size, device=device, dtype=dtype))
    metadata = kernels.plan_attention([1] * count, [context] * count, places.view(count, per_row), BLOCK_SIZE, [0])
    query = torch.randn(count, shape.num_attention_heads, shape.head_dim, device=device, dtype=dtype)

    def work() -> Tensor:
        return kernels.paged_attention(query, cache, metadata, shape.head_dim**-0.5, 0)

    flops = 4.0 * count * context * shape.num_attention_heads * shape.head_dim
    return "attention, decode", count, work, flops, 2.0 * dtype.itemsize * count * context * size[2] * size[3]


def native_lines(shape: DecoderShape, rows: Sequence[int], dtype: torch.dtype, threads: int) -> list[Row]:
    """The native library's linears; none where it cannot be had."""
    try:
        native = load_native()
    except NativeUnavailable as error:
        click.echo(f"no native kernels: {error}", err=True)
        return []
    native.set_threads(threads or os.cpu_count() or 1, pin=False)
    return [line("native", op, "cpu") for op in native_ops(native, shape, rows, dtype)]


def native_ops(native: Native, shape: DecoderShape, rows: Sequence[int], dtype: torch.dtype) -> Iterator[Op]:
    for name, (out, into) in linears(shape).items():
        packed = torch.empty(native.packed_bytes(out, into, dtype), dtype=torch.uint8)
        weight = native.pack_linear(torch.randn(out, into).to(dtype), dtype, packed)
        for count in rows:
            x = torch.randn(count, into)
            yield linear_op(name, x, partial(native.linear, x, weight), (out, into), dtype.itemsize)
