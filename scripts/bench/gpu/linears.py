"""Linears of codes, decoded or in E4M3 on both sides: of the time that reading their bytes takes where rows are few,
and of the vendor's time in bfloat16 where they are many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from kernels.ops.experts.experts import Linear
from kernels.ops.linears import linear_decoded as decoded
from kernels.ops.linears import linear_fp8 as octets_reference
from kernels.ops.linears.codes import E2M1, Codes
from kernels.ops.linears.linear import LinearWeight
from scripts.bench.common.report import Result
from scripts.bench.gpu.attention import seconds_in_graph

SIZE = 8192  # features on both sides
FEW, MANY = (1, 16, 64), (512, 2048)  # rows
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


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """Weights of one kind, whose memory no other has, and what multiplies them."""

    linear: Linear
    weights: list[LinearWeight]
    num_bytes: int  # of one

    def seconds(self, x: torch.Tensor) -> float:
        """Of a product in a graph, with the weights in turn, so that the card's cache has none when its turn comes."""
        weights = cycle(self.weights)
        return seconds_in_graph(lambda: self.linear(x, next(weights), None))


def kinds() -> Iterator[tuple[str, CodedLinear]]:
    from kernels.triton.linears import linear_fp8
    from kernels.triton.linears.linear import linear

    device = torch.device("cuda")
    for name, codes in decoded_kinds(SIZE, SIZE).items():
        packed = decoded.pack_decoded(codes.to(device))
        assert packed.decoded is not None
        yield name, CodedLinear(linear, _copies(packed), packed.decoded.nbytes)
    for group in (SIZE, 128):
        octets = torch.randn(SIZE, SIZE, device=device).to(torch.float8_e4m3fn)
        packed = octets_reference.pack_codes(Codes(octets, torch.ones(SIZE, SIZE // group, device=device), group, 8))
        assert packed.scales is not None
        name = f"E4M3 on both sides, {'whole rows' if group == SIZE else f'groups of {group}'}"
        yield name, CodedLinear(linear_fp8.linear, _copies(packed), packed.weight.nbytes + packed.scales.nbytes)


def _copies(packed: LinearWeight) -> list[LinearWeight]:
    return [packed, *(_copied(packed) for _ in range(NUM_COPIES - 1))]


def _copied(packed: LinearWeight) -> LinearWeight:
    if packed.decoded is None:
        return replace(packed, weight=packed.weight.clone())
    return replace(packed, decoded=replace(packed.decoded, codes=packed.decoded.codes.clone()))


def measure_linears(bandwidth: float) -> list[Result]:
    """`bandwidth`: bytes/s of a copy in the same run."""
    lines = []
    plain = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    rows = {count: torch.randn(count, SIZE, dtype=torch.bfloat16, device="cuda") for count in (*FEW, *MANY)}
    vendor = {
        count: seconds_in_graph(lambda x=rows[count]: torch.nn.functional.linear(x, plain))  # type: ignore[misc]
        for count in MANY
    }
    for name, kind in kinds():
        floor = kind.num_bytes / bandwidth
        for count, x in rows.items():
            taken = kind.seconds(x)
            what, note = f"linear of {SIZE} x {SIZE}, {name}, {count} rows", f"{taken * 1e6:.1f} us"
            if count in FEW:
                least = SHARE if count == 1 else None
                lines.append(Result(f"{what}: of the floor", floor / taken, at_least=least, note=note))
            else:
                lines.append(Result(f"{what}: as fast as the vendor's bfloat16", vendor[count] / taken, note=note))
    return lines
