"""Compares a native library with the references, in a few milliseconds: compilers and processors can be wrong too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.coded import coding_of
from kernels.cpu.binding.linear_attention import from_panels, to_panels
from kernels.cpu.binding.native import KVShape, Native, StepColumns
from kernels.cpu.binding.packing import FORMATS, KV_FORMATS, NIBBLES
from kernels.ops import digest
from kernels.ops.attention import attention, kv_store
from kernels.ops.attention.kv_cache import FP8S, KVCache
from kernels.ops.layers import rms_norm
from kernels.ops.linears import linear, linear_codes, linear_int8
from kernels.ops.linears.codes import E2M1, UINT4, Codes, quantise_to_codes
from kernels.ops.sampling import truncation
from kernels.ops.states import causal_conv, delta_rule
from kernels.ops.states.state_plan import StatePlan

TOLERANCE = 1e-4
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
LENGTHS = ((5, 20), (33, 1))  # (computed, scheduled) of each sequence


def first_difference(native: Native) -> str:
    """The first op that is not what its reference says; empty where all are."""
    checks: dict[str, Callable[[], bool]] = {"rms_norm": lambda: check_rms_norm(native)}
    checks |= {f"linear in {dtype}": lambda dtype=dtype: check_linear(native, dtype) for dtype in FORMATS}  # type: ignore[misc]
    checks["linear of rounded rows"] = lambda: check_rounded_linear(native)
    checks |= {f"linear in {dtype}": lambda dtype=dtype: check_codes(native, dtype) for dtype in NIBBLES}  # type: ignore[misc]
    checks |= {f"linear of {name}": lambda codes=codes: check_decoded(native, codes) for name, codes in decoded_codes()}  # type: ignore[misc]
    checks |= {f"attention over {dtype}": lambda dtype=dtype: check_attention(native, dtype) for dtype in KV_FORMATS}  # type: ignore[misc]
    checks["linear attention"] = lambda: check_linear_attention(native)
    checks["digest"] = lambda: check_digest(native)
    checks["copy with a checksum"] = lambda: check_copy(native)
    checks["truncation"] = lambda: check_truncation(native)
    return next((name for name, check in checks.items() if not check()), "")


def check_rms_norm(native: Native) -> bool:
    x, weight = _random(3, 48), _random(48)
    return _near(native.rms_norm(x, weight, 1e-5), rms_norm.rms_norm(x, weight, 1e-5))


def check_linear(native: Native, dtype: torch.dtype) -> bool:
    x, weight = _random(19, 64), _random(72, 64)
    packed = native.pack_linear(weight, dtype, torch.empty(native.packed_bytes(72, 64, dtype), dtype=torch.uint8))
    if dtype == torch.int8:
        wanted = linear_int8.linear(x, linear_int8.pack_linear(weight))
    else:
        wanted = linear.linear(x, linear.pack_linear(weight.to(dtype).float()))
    return _near(native.linear(x, packed), wanted)


def check_rounded_linear(native: Native) -> bool:
    """By products of bfloat16 where the processor has them, of vectors or of tiles."""
    x, weight = _random(37, 64), _random(72, 64).bfloat16()
    packed = torch.empty(native.packed_bytes(72, 64, weight.dtype), dtype=torch.uint8)
    found = native.linear(x, native.pack_linear(weight, weight.dtype, packed), rounds=True)
    return _near(found, linear.linear(x.bfloat16().float(), linear.pack_linear(weight.float())))


def check_codes(native: Native, dtype: torch.dtype) -> bool:
    """Groups of 32, the last a half; one row alone, a tile of them, and more."""
    x, codes = _random(19, 80), quantise_to_codes(_random(72, 80), 32)
    if dtype == UINT4:
        assert codes.zeros is not None
        zeros = codes.zeros.random_(0, 16, generator=_seeded(4))
        codes = replace(codes, scales=codes.scales * (1 + 2**-20), zeros=zeros)
    packed = torch.empty(native.packed_bytes(72, 80, dtype, codes.group), dtype=torch.uint8)
    weight, wanted = native.pack_codes(codes, packed), linear_codes.linear(x, linear_codes.pack_codes(codes))
    return all(_near(native.linear(x[:rows], weight), wanted[:rows]) for rows in (1, 5, 19))


def decoded_codes() -> Iterator[tuple[str, Codes]]:
    """Of every kind that is decoded, in groups of 32, the last a half."""
    scales, generator = _random(72, 3).abs() / 8, _seeded(5)
    octets = torch.randint(0, 256, (72, 80), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (72, 3), dtype=torch.uint8, generator=generator)
    yield "E4M3", Codes((32 * _random(72, 80)).to(torch.float8_e4m3fn), scales, 32, 8)
    yield "E2M1", Codes(octets & 15, scales.bfloat16().float(), 32, 4, table=E2M1)
    yield "4 bits", Codes(octets & 15, scales.half().float(), 32, 4, torch.full_like(zeros, 8))
    yield "4 bits with zeros", Codes(octets & 15, scales, 32, 4, zeros)
    yield "8 bits", Codes(octets, scales, 32, 8, zeros + 120)


def check_decoded(native: Native, codes: Codes) -> bool:
    """As numbers of float32 and of bfloat16; one row alone, and more than a tile."""
    x, size = _random(37, 80), native.coded_bytes(72, 80, coding_of([codes]), codes.group)
    packed, values = torch.empty(size, dtype=torch.uint8), codes.dequantised()
    for dtype in (torch.float32, torch.bfloat16):
        weight = native.pack_coded(codes, dtype, packed)
        for rounds in (False, True):
            given, held = x.bfloat16().float() if rounds else x, values.to(dtype).float()
            wanted = linear.linear(given, linear.pack_linear(held))
            if not all(_near(native.linear(x[:rows], weight, rounds=rounds), wanted[:rows]) for rows in (1, 37)):
                return False
    return True


def check_attention(native: Native, dtype: torch.dtype) -> bool:
    total = sum(computed + scheduled for computed, scheduled in LENGTHS)
    key, value = _random(total, KV_HEADS, HEAD_DIM), _random(total, KV_HEADS, HEAD_DIM)
    query = _random(sum(scheduled for _, scheduled in LENGTHS), HEADS, HEAD_DIM)
    tables = np.array([[4, 0, 0], [2, 5, 1]])
    tables[0, 1] = 3
    slots = _slots(tables)
    wanted = _reference_attention(dtype, query, key, value, slots, tables)
    return _near(_native_attention(native, dtype, query, key, value, slots, tables), wanted)


def check_linear_attention(native: Native) -> bool:
    """The convolution and the delta rule, each of one sequence that begins and one that goes on."""
    heads, dim, channels, counts = 2, 16, 3 * 32, [scheduled for _, scheduled in LENGTHS]
    x, gates, taps = _random(sum(counts), channels), _random(sum(counts), 2 * heads), _random(4, channels)
    rate, bias = _random(heads).abs(), _random(heads)
    inputs, states = _random(2, 3, channels), _random(2, heads, dim, dim)
    held = inputs.clone(), to_panels(states).clone()
    delta = abi.PgDelta(heads, heads, dim, dim, len(taps), taps=taps.data_ptr())
    delta.rate, delta.bias = rate.data_ptr(), bias.data_ptr()
    delta.inputs, delta.states = (tensor.data_ptr() for tensor in held)
    rows, computed, scheduled = np.arange(2), np.array([0, 33]), np.array(counts)
    columns = StepColumns(torch.zeros(2, 64, dtype=torch.int64), np.zeros((2, 1), np.int64))
    step = columns.fill(rows, computed, scheduled, scheduled)
    starts = torch.tensor([0, counts[0], sum(counts)])
    plan = StatePlan(torch.from_numpy(rows), starts, torch.from_numpy(computed))
    convolved = causal_conv.causal_conv(x, taps, inputs, plan)
    query, key, value = (part.reshape(len(x), heads, dim) for part in x.chunk(3, dim=1))
    decay, beta = delta_rule.delta_gates(gates, rate, bias)
    result = delta_rule.gated_delta_rule(query, key, value, decay, beta, states, plan)
    found = native.causal_conv(delta, step, x), native.delta_rule(delta, step, x, gates)
    both = zip((*found, held[0], from_panels(held[1])), (convolved, result.flatten(1), inputs, states), strict=True)
    return all(_near(one, wanted) for one, wanted in both)


def check_digest(native: Native) -> bool:
    rows = np.arange(300 * 615, dtype=np.uint32).astype(np.uint8).reshape(300, 615)
    return np.array_equal(native.row_sums(rows), digest.row_sums(rows))


def check_copy(native: Native) -> bool:
    """Where the processor has the instructions."""
    source = bytes(range(251)) * 4
    place = memoryview(bytearray(len(source)))
    return not native.copies_checked or (
        native.copy_checked(place, memoryview(source)) == crc32(source) == crc32(place)
    )


def check_truncation(native: Native) -> bool:
    values = 4 * _random(4, 100)
    limits = torch.full((4,), -2.0).double(), torch.tensor([0, 5, 0, 30]), torch.tensor([1.0, 1.0, 0.8, 0.5]).double()
    found, wanted = native.truncation(values, *limits), truncation.truncation(values, *limits)
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def _slots(tables: np.ndarray) -> Tensor:  # [total] int64
    positions = [np.arange(sum(lengths)) for lengths in LENGTHS]
    slots = [
        table[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
        for table, where in zip(tables, positions, strict=True)
    ]
    return torch.from_numpy(np.concatenate(slots))


def _reference_attention(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, tables: np.ndarray
) -> Tensor:
    shape = (int(tables.max()) + 1, BLOCK_SIZE, KV_HEADS)
    scales = [torch.zeros(shape) if dtype == torch.int8 else None for _ in range(2)]
    by_head = [torch.ones(KV_HEADS) if dtype in FP8S else None for _ in range(2)]
    cache = KVCache(*(torch.zeros((*shape, HEAD_DIM), dtype=dtype) for _ in range(2)), *scales, *by_head)
    kv_store.store_kv(key, value, cache, slots)
    lengths = [scheduled for _, scheduled in LENGTHS]
    plan = attention.plan_attention(lengths, [sum(both) for both in LENGTHS], torch.from_numpy(tables), BLOCK_SIZE, [0])
    return attention.paged_attention(query, cache, plan, HEAD_DIM**-0.5, 0)


def _native_attention(
    native: Native, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, tables: np.ndarray
) -> Tensor:
    shape = KVShape(dtype, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    keys, values = (
        torch.zeros(int(tables.max()) + 1, size, dtype=torch.uint8)
        for size in (native.key_bytes(shape), native.value_bytes(shape))
    )
    native.store_kv(shape, key, value, slots, keys, values)
    computed, scheduled = (np.array(column) for column in zip(*LENGTHS, strict=True))
    step = StepColumns(torch.zeros(2, 64, dtype=torch.int64), tables).fill(np.arange(2), computed, scheduled, scheduled)
    model = abi.PgModel(block_size=BLOCK_SIZE, kv_format=KV_FORMATS[dtype])
    layer = abi.PgLayer(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )
    return native.attention(model, layer, step, query)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_seeded(sum(shape)))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * (1 + wanted.abs().max()))
