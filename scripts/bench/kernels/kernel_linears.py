"""One linear in every format that native kernels hold weights in: plain, multiplied as codes, decoded meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kernels.cpu.binding.coded import coding_of
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear, codes_format
from kernels.ops.linears.codes import E2M1, ZERO, Codes

ROWS = (1, 8, 32, 512)
UNCACHED = 1 << 28  # bytes of copies that take turns, so that no cache has the next one
HEADER = ("linear", "bits per weight", *(f"{rows} rows, ms" for rows in ROWS), "1 row, GB/s")


def weights(native: Native, n: int, k: int) -> Iterator[tuple[str, PackedLinear]]:
    """What a linear takes does not depend on what is in it, but numbers must not be denormal."""
    octets, dtype = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.bfloat16

    def scales(group: int) -> torch.Tensor:
        return torch.full((n, -(-k // group)), 1 / 700)

    def memory(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    for plain in (torch.bfloat16, torch.int8):
        packed = memory(native.packed_bytes(n, k, plain))
        yield str(plain).removeprefix("torch."), native.pack_linear(octets.to(dtype), plain, packed)
    four = Codes(octets, scales(64).half().float(), 64, 4, torch.full(scales(64).shape, ZERO, dtype=torch.uint8))
    yield "W4A8", native.pack_codes(four, memory(native.packed_bytes(n, k, codes_format([four]), 64)))
    kinds = {
        "4 bits, groups of 64": four,
        "MXFP4": Codes(octets, scales(32).bfloat16().float(), 32, 4, table=E2M1),
        "FP8, groups of 128": Codes(octets.view(torch.float8_e4m3fn), scales(128), 128, 8),
        "8 bits, groups of 64": replace(four, bits=8),
    }
    for name, codes in kinds.items():
        packed = memory(native.coded_bytes(n, k, coding_of([codes]), codes.group))
        yield f"{name}, decoded", native.pack_coded(codes, dtype, packed)


def linear_lines(native: Native, k: int, n: int, rounds: int) -> list[tuple[str, ...]]:
    found = []
    for name, weight in weights(native, n, k):
        times = [_seconds(native, weight, rows, rounds) for rows in ROWS]
        bits = f"{8 * weight.packed.nbytes / n / k:.2f}"
        speed = f"{weight.packed.nbytes / times[0] / 1e9:.1f}"
        found.append((name, bits, *(f"{1e3 * one:.2f}" for one in times), speed))
    return found


def _seconds(native: Native, weight: PackedLinear, rows: int, rounds: int) -> float:
    """Of the best round: each goes once through all copies."""
    copies: Sequence[PackedLinear] = [
        replace(weight, packed=weight.packed.clone()) for _ in range(max(1, UNCACHED // weight.packed.nbytes // rows))
    ]
    x, times = torch.randn(rows, weight.k), []
    for _ in range(rounds):
        begin = time.perf_counter()
        for one in copies:
            native.linear(x, one, rounds=True)
        times.append((time.perf_counter() - begin) / len(copies))
    return min(times)
