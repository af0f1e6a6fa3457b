"""Which formats the settings and the checkpoint come to."""

from __future__ import annotations

import pytest
import torch

from shared.modeling.formats import Formats, resolve_device, resolve_formats

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolve(stored: torch.dtype, device: torch.device = CPU, *, fast: bool = False, **settings: str) -> Formats:
    given = {"dtype": "auto", "quantization": "none", "kv_cache_dtype": "auto"} | settings
    return resolve_formats(**given, stored=stored, device=device, fast_bfloat16=fast)


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
        (resolve(BF16, kv_cache_dtype="float32"), Formats(F32, BF16, F32)),
        (resolve(F32, kv_cache_dtype="bfloat16"), Formats(F32, F32, BF16)),
        (resolve(F32, kv_cache_dtype="int8"), Formats(F32, F32, I8)),
        # int8 weights
        (resolve(BF16, quantization="int8"), Formats(F32, I8, BF16)),
        (resolve(F32, quantization="int8"), Formats(F32, I8, BF16)),
        (resolve(F32, quantization="int8", kv_cache_dtype="int8"), Formats(F32, I8, I8)),
        # a GPU computes as the checkpoint is stored
        (resolve(BF16, GPU), Formats(BF16, BF16, BF16)),
        (resolve(F16, GPU), Formats(F16, F16, F16)),
        (resolve(BF16, GPU, dtype="float32"), Formats(F32, F32, F32)),
        (resolve(BF16, GPU, kv_cache_dtype="int8"), Formats(BF16, BF16, I8)),
    ],
)
def test_formats(found: Formats, expected: Formats) -> None:
    assert found == expected


def test_rounding_is_of_bfloat16_arithmetic_alone() -> None:
    assert Formats(BF16, BF16, BF16).rounds
    assert not Formats(F32, BF16, BF16).rounds
    assert not Formats(BF16, I8, BF16).rounds, "int8 rounds in its own way"
    assert str(Formats(F32, I8, BF16)) == "float32, weights int8, KV cache bfloat16"


def test_cpu_by_name() -> None:
    assert resolve_device("cpu") == CPU
