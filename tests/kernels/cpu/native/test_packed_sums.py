"""Sums that packing and copying make of what they read are the reference's, and change nothing of what they write."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.binding.contents import rows_of
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import FORMATS, TOGETHER
from kernels.ops import digest
from kernels.ops.digest import Sums
from kernels.ops.linears.codes import INT4
from tests.kernels.cpu.natives import BUILDS, load_build

DTYPES = (*FORMATS, INT4)
GROUP = 64  # of int4
STORED = (torch.float32, torch.bfloat16, torch.float16)  # the last is converted before it is packed
# Rows of the parts of a weight, and its input features: of those bfloat16 takes an even number, int8 a multiple
# of 4, int4 one of 16.
WEIGHTS = {
    "less than a stripe": ((5,), 7),
    "one panel in all": ((32,), 1024),
    "rows that end with stripes": ((512,), 1024),
    "an odd number of features": ((333,), 401),
    "long rows": ((37,), 70001),
    "query, key and value": ((130, 67, 67), 811),
    "parts smaller than a panel": ((3, 1, 2, 40), 333),
    "a part that is empty": ((20, 0, 9), 4000),
    "many panels": ((1000, 24), 1024),
}


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    yield library
    library.set_threads(1, pin=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def features(wanted: int, dtype: torch.dtype) -> int:
    """The next number of them that the format packs."""
    multiple = TOGETHER[dtype]
    return -(-wanted // multiple) * multiple


def zeros(tensors: list[Tensor]) -> Sums:
    return np.zeros((len(tensors), digest.WORDS), np.uint64)


def memory(native: Native, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(native.packed_bytes(n, k, dtype, GROUP), dtype=torch.uint8)


def assert_sums(found: Sums, tensors: list[Tensor]) -> None:
    for sums, tensor in zip(found, tensors, strict=True):
        assert np.array_equal(sums, digest.row_sums(rows_of(tensor)))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_packed_linear(native: Native, name: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    rows, k = WEIGHTS[name][0], features(WEIGHTS[name][1], dtype)
    parts = [normal(n, k, seed=index).to(stored) for index, n in enumerate(rows)]
    wanted = native.pack_linear(torch.cat(parts), dtype, memory(native, sum(rows), k, dtype), group=GROUP)
    for threads in (1, 2, 3):
        native.set_threads(threads, pin=False)
        sums = zeros(parts)
        packed = native.pack_linear(parts, dtype, memory(native, sum(rows), k, dtype), group=GROUP, sums=sums)
        assert_sums(sums, parts)
        assert torch.equal(packed.packed, wanted.packed) and packed.n == wanted.n


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "k"), [(16, 5), (16, 2048), (112, 401), (48, 70001), (512, 1024), (720, 811)])
def test_packed_gate_and_up(native: Native, inner: int, k: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    k = features(k, dtype)
    gate, up = (normal(inner, k, seed=seed).to(stored) for seed in range(2))
    wanted = native.pack_gate_up(gate, up, dtype, memory(native, 2 * inner, k, dtype), group=GROUP)
    for threads in (1, 2, 3):
        native.set_threads(threads, pin=False)
        sums = zeros([gate, up])
        packed = native.pack_gate_up(gate, up, dtype, memory(native, 2 * inner, k, dtype), group=GROUP, sums=sums)
        assert_sums(sums, [gate, up])
        assert torch.equal(packed.packed, wanted.packed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(0,), (7,), (32768,), (1001, 401)])
def test_a_copy(native: Native, shape: tuple[int, ...], dtype: torch.dtype, stored: torch.dtype) -> None:
    source = normal(*shape).to(stored)
    for threads in (1, 2, 3):
        native.set_threads(threads, pin=False)
        sums = zeros([source])
        copied = native.copy(source, torch.empty(source.shape, dtype=dtype), sums)
        assert_sums(sums, [source])
        assert torch.equal(copied, source.to(dtype)) and copied.dtype == dtype
        assert not source.nbytes or copied.data_ptr() != source.data_ptr()


def test_parts_of_several_formats(native: Native) -> None:
    parts = [normal(20, 900), normal(9, 900).bfloat16(), normal(11, 900).half()]
    sums = zeros(parts)
    packed = native.pack_linear(parts, torch.bfloat16, memory(native, 40, 900, torch.bfloat16), sums=sums)
    assert_sums(sums, parts)
    wanted = native.pack_linear(torch.cat(parts), torch.bfloat16, memory(native, 40, 900, torch.bfloat16))
    assert torch.equal(packed.packed, wanted.packed)


def test_what_is_not_contiguous(native: Native) -> None:
    weight = normal(900, 40).t()
    sums = zeros([weight])
    native.pack_linear(weight, torch.float32, memory(native, 40, 900, torch.float32), sums=sums)
    assert_sums(sums, [weight.contiguous()])


def test_sums_of_another_size_are_refused(native: Native) -> None:
    weight, packed = normal(40, 900), memory(native, 40, 900, torch.float32)
    with pytest.raises(ValueError, match="sums are uint64"):
        native.pack_linear(weight, torch.float32, packed, sums=np.zeros((1, 1), np.uint64))
    with pytest.raises(ValueError):
        native.pack_linear(weight, torch.float32, packed, sums=zeros([weight, weight]))
    with pytest.raises(ValueError, match="401 input features"):
        native.packed_bytes(40, 401, torch.bfloat16)
    with pytest.raises(ValueError, match="gate is"):
        native.pack_gate_up(weight, weight.bfloat16(), torch.float32, memory(native, 80, 900, torch.float32))
    with pytest.raises(ValueError, match="40 rows of gate and up"):
        native.pack_gate_up(weight, weight, torch.float32, memory(native, 80, 900, torch.float32))
    with pytest.raises(ValueError, match="expected contiguous"):
        native.pack_linear([weight, normal(2, 3)], torch.float32, memory(native, 42, 900, torch.float32))
