"""Which formats the settings and the checkpoint come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.description.spec import AttentionSpec
from engine.modeling.kv_pool import KVLayout, KVPool
from engine.weights.formats import Formats, resolve_device, resolve_formats
from kernels.ops.attention.kv_cache import FP8S
from kernels.ops.attention.kv_store import store_kv
from kernels.ops.linears.codes import INT4
from shared.config import Settings
from shared.errors import ConfigError

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolve(
    stored: torch.dtype, device: torch.device = CPU, *, fast: bool = False, codes: bool = False, **settings: Any
) -> Formats:
    """`codes`: the checkpoint is quantised, but not in integer codes."""
    given = Settings.of(**{"quantization": "none"} | settings)
    return resolve_formats(given.engine, given.memory, stored, device, fast_bfloat16=fast, quantised=codes)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # auto on a CPU: weights as they come, arithmetic in float32
        (resolve(BF16), Formats(F32, BF16, BF16)),
        (resolve(F16), Formats(F32, F32, F32)),
        (resolve(F32), Formats(F32, F32, F32)),
        # bfloat16 by itself only where it is faster and nothing is lost by it
        (resolve(BF16, fast=True), Formats(BF16, BF16, BF16)),
        (resolve(F32, fast=True), Formats(F32, F32, F32)),
        # by name
        (resolve(BF16, fast=True, dtype="float32"), Formats(F32, BF16, BF16)),
        (resolve(F32, dtype="bfloat16"), Formats(BF16, BF16, BF16)),
        (resolve(BF16, dtype="float16"), Formats(F16, F16, F16)),
        (resolve(BF16, dtype="half"), Formats(F16, F16, F16)),
        (resolve(BF16, fast=True, dtype="float"), Formats(F32, BF16, BF16)),
        (resolve(BF16, kv_cache_dtype="float32"), Formats(F32, BF16, F32)),
        (resolve(F32, kv_cache_dtype="bfloat16"), Formats(F32, F32, BF16)),
        (resolve(F32, kv_cache_dtype="int8"), Formats(F32, F32, I8)),
        (resolve(F32, kv_cache_dtype="fp8"), Formats(F32, F32, torch.float8_e4m3fn)),
        (resolve(F32, kv_cache_dtype="fp8_e4m3"), Formats(F32, F32, torch.float8_e4m3fn)),
        (resolve(BF16, kv_cache_dtype="fp8_e5m2"), Formats(F32, BF16, torch.float8_e5m2)),
        # int8 weights
        (resolve(BF16, quantization="int8"), Formats(F32, I8, BF16)),
        (resolve(F32, quantization="int8"), Formats(F32, I8, BF16)),
        (resolve(F32, quantization="int8", kv_cache_dtype="int8"), Formats(F32, I8, I8)),
        # dequantised weights are rounded as the rest is stored, unless float32 is asked for
        (resolve(BF16, codes=True), Formats(F32, BF16, BF16)),
        (resolve(BF16, fast=True, codes=True), Formats(BF16, BF16, BF16)),
        (resolve(BF16, codes=True, dtype="float32"), Formats(F32, F32, F32)),
        (resolve(F16, codes=True), Formats(F32, F32, F32)),
        (resolve(BF16, codes=True, dtype="float32", quantization="int8"), Formats(F32, I8, BF16)),
        (resolve(BF16, GPU, codes=True), Formats(BF16, BF16, BF16)),
        # int4 weights
        (resolve(BF16, quantization="int4"), Formats(F32, INT4, BF16, I8, 64)),
        (resolve(BF16, quantization="int4", quantization_group=32), Formats(F32, INT4, BF16, I8, 32)),
        (resolve(BF16, quantization="int4", quantization_head="none"), Formats(F32, INT4, BF16, BF16, 64)),
        (resolve(F32, quantization="int4", quantization_head="none"), Formats(F32, INT4, BF16, F32, 64)),
        (resolve(BF16, quantization="int8", quantization_head="none"), Formats(F32, I8, BF16, BF16)),
        (resolve(BF16, GPU, quantization="int4", quantization_head="none"), Formats(BF16, INT4, BF16, BF16, 64)),
        # E4M3 weights
        (resolve(BF16, GPU, quantization="fp8"), Formats(BF16, torch.float8_e4m3fn, BF16, I8)),
        (
            resolve(BF16, GPU, quantization="fp8", quantization_head="none"),
            Formats(BF16, torch.float8_e4m3fn, BF16, BF16),
        ),
        # a GPU computes as the checkpoint is stored
        (resolve(BF16, GPU), Formats(BF16, BF16, BF16)),
        (resolve(F16, GPU), Formats(F16, F16, F16)),
        (resolve(BF16, GPU, dtype="float32"), Formats(F32, F32, F32)),
        (resolve(BF16, GPU, kv_cache_dtype="int8"), Formats(BF16, BF16, I8)),
        (resolve(BF16, GPU, kv_cache_dtype="fp8"), Formats(BF16, BF16, torch.float8_e4m3fn)),
    ],
)
def test_formats(found: Formats, expected: Formats) -> None:
    assert found == expected


def resolve_kept(
    stored: torch.dtype, device: torch.device = CPU, *, native: bool = True, codes: bool = True, **settings: Any
) -> Formats:
    given = Settings.of(**settings)
    return resolve_formats(
        given.engine, given.memory, stored, device, native=native, fast_bfloat16=native, quantised=True, codes=codes
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (resolve_kept(BF16), Formats(BF16, BF16, BF16, keeps_codes=True)),
        (resolve_kept(F16), Formats(BF16, BF16, BF16, keeps_codes=True)),  # beside codes no float16 is held in float32
        (resolve_kept(F32), Formats(F32, F32, F32, keeps_codes=True)),
        # exact, or as torch does it
        (resolve_kept(F16, dtype="float32"), Formats(F32, F32, F32)),
        (resolve_kept(F16, dtype="float"), Formats(F32, F32, F32)),
        (resolve_kept(F16, quantization="none"), Formats(F32, F32, F32)),
        (resolve_kept(BF16, native=False), Formats(F32, BF16, BF16)),
        (resolve_kept(BF16, codes=False), Formats(BF16, BF16, BF16)),
        (resolve_kept(F16, GPU, native=False), Formats(F16, F16, F16)),
        # beside int4, wherever it is computed
        (resolve_kept(F16, quantization="int4"), Formats(F32, INT4, BF16, I8, 64, keeps_codes=True)),
        (resolve_kept(F16, quantization="int4", native=False), Formats(F32, INT4, BF16, I8, 64, keeps_codes=True)),
        (resolve_kept(F16, quantization="int8"), Formats(F32, I8, BF16)),
    ],
)
def test_codes_stay_where_kernels_multiply_them(found: Formats, expected: Formats) -> None:
    assert found == expected


def test_rounding_is_of_bfloat16_arithmetic_alone() -> None:
    assert Formats(BF16, BF16, BF16).rounds
    assert not Formats(F32, BF16, BF16).rounds
    assert not Formats(BF16, I8, BF16).rounds, "int8 rounds in its own way"
    assert not Formats(BF16, INT4, BF16, I8, 64).rounds
    assert Formats(BF16, INT4, BF16, BF16, 64).rounds, "the head's inputs"
    assert Formats(BF16, I8, BF16).rounds_attention, "its keys and values are in bfloat16"
    assert not Formats(F32, I8, BF16).rounds_attention
    assert not Formats(BF16, BF16, I8).rounds_attention
    assert str(Formats(F32, I8, BF16)) == "float32, weights int8, KV cache bfloat16"
    named = str(Formats(F32, INT4, BF16, I8, 32))
    assert named == "float32, weights int4 in groups of 32, head int8, KV cache bfloat16"


def test_what_a_fingerprint_says_of_quantisation() -> None:
    assert Formats(F32, BF16, BF16).quantization == "none"
    assert Formats(F32, I8, BF16).quantization == "int8"
    assert Formats(F32, I8, BF16, BF16).quantization == "int8, head bfloat16"
    assert Formats(BF16, torch.float8_e4m3fn, BF16, I8).quantization == "float8_e4m3fn"
    assert Formats(F32, INT4, BF16, I8, 64).quantization == "int4, groups of 64"
    assert Formats(F32, INT4, BF16, F32, 32).quantization == "int4, groups of 32, head float32"
    assert Formats(BF16, BF16, BF16, keeps_codes=True).quantization == "as stored"
    assert Formats(F32, INT4, BF16, I8, 64, True).quantization == "int4, groups of 64, codes as stored"


def test_fp8_with_two_bits_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8_e5m2', which is for CPUs"):
        resolve(BF16, GPU, kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("dtype", FP8S)
def test_a_pool_in_fp8(dtype: torch.dtype) -> None:
    """A byte for each number; the scales belong to no block, and blocks are copied as bytes."""
    heads = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=8)
    layout = KVLayout((heads, heads), dtype, CPU)
    assert sum(layout.layer_bytes(16)) == 2 * 2 * 16 * 3 * 8
    caches = layout.make_caches([4, 4], 16)
    pool = KVPool(4, 16, [tensor for cache in caches for tensor in cache.tensors])
    assert len(pool.tensors) == 4
    store_kv(torch.full((1, 3, 8), 1.5), torch.full((1, 3, 8), -2.0), caches[0], torch.tensor([17]))
    pool.copy_blocks([(1, 3)])
    for block in (1, 3):
        assert caches[0].read_keys(torch.tensor([block]))[0, 1].tolist() == [[1.5] * 8] * 3
        assert caches[0].read_values(torch.tensor([block]))[0, 1].tolist() == [[-2.0] * 8] * 3
    assert not caches[1].read_keys(torch.arange(4)).any()


def test_cpu_by_name() -> None:
    assert resolve_device("cpu") == CPU
