"""Linears whose weights are decoded while they are multiplied: of the time that reading their bytes takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import torch

from kernels.ops import linear_decoded as reference
from kernels.ops.codes import E2M1, Codes
from kernels.ops.linear import LinearWeight
from scripts.bench.common.report import Result
from scripts.bench.gpu.attention import seconds_in_graph

SIZE = 8192  # features on both sides
NUM_ROWS = (1, 16, 64)
NUM_COPIES = 4  # in turn, so that the card's cache has none when its turn comes
# Marlin takes 20.3 us for one row of 4 bits on an H200, whose memory brings that many bytes in 7.3 us; 1.15 times that.
SHARE = 0.31


def decoded_kinds(out_features: int, in_features: int) -> dict[str, Codes]:
    """One weight of each kind, of random codes."""
    octets = torch.randint(16, (out_features, in_features), dtype=torch.uint8)

    def scales(group: int) -> torch.Tensor:
        return torch.ones(out_features, -(-in_features // group))

    zeros = torch.full_like(scales(128), 8, dtype=torch.uint8)
    return {
        "4 bits, groups of 128": Codes(octets, scales(128), 128, 4, zeros),
        "E2M1, groups of 32": Codes(octets, scales(32), 32, 4, table=E2M1),
        "E2M1, groups of 16": Codes(octets, scales(16), 16, 4, table=E2M1),
        "E4M3, groups of 128": Codes(octets.view(torch.float8_e4m3fn), scales(128), 128, 8),
    }


class InTurn:
    """Products with weights in turn."""

    def __init__(self, x: torch.Tensor, weights: list[LinearWeight]) -> None:
        self._x, self._weights = x, cycle(weights)

    def __call__(self) -> torch.Tensor:
        from kernels.triton.linear import linear

        return linear(self._x, next(self._weights), None)


def copied(weight: LinearWeight) -> LinearWeight:
    assert weight.decoded is not None
    return replace(weight, decoded=replace(weight.decoded, codes=weight.decoded.codes.clone()))


def measure_linears(bandwidth: float) -> list[Result]:
    """`bandwidth`: bytes/s of a copy in the same run."""
    lines = []
    for kind, codes in decoded_kinds(SIZE, SIZE).items():
        weight = reference.pack_decoded(codes.to(torch.device("cuda")))
        held = weight.decoded
        assert held is not None
        floor = held.nbytes / bandwidth
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, SIZE, dtype=torch.bfloat16, device="cuda")
            taken = seconds_in_graph(InTurn(x, [weight, *(copied(weight) for _ in range(NUM_COPIES - 1))]))
            what = f"linear of {SIZE} x {SIZE}, {kind}, {num_rows} rows: of the floor"
            note = f"{taken * 1e6:.1f} us"
            lines.append(Result(what, floor / taken, at_least=SHARE if num_rows == 1 else None, note=note))
    return lines
