"""A mixture's experts as codes beside the same in bfloat16: of the time that reading the bytes of those takes which a
step's tokens go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from kernels.ops.experts.experts import ExpertWeights
from kernels.ops.experts.experts_decoded import pack_experts_decoded
from kernels.ops.linears.codes import E2M1, Codes
from scripts.bench.common.report import Result
from scripts.bench.gpu.attention import seconds_in_graph

TOKENS = (1, 16, 64, 512)
GROUP = 32
NUM_ROUTINGS = 8  # in turn, so that a step of few tokens goes to experts which the card's cache does not have


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A layer's experts, gated, with biases."""

    hidden: int
    inner: int
    count: int
    top_k: int


GPT_OSS_20B = MixtureShape(2880, 2880, 32, 4)


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of both products."""

    gate_up: ExpertWeights
    down: ExpertWeights

    @property
    def expert_bytes(self) -> float:
        """Of one, without biases."""
        sizes = (one.decoded or one.stacked for one in (self.gate_up, self.down))
        return sum(size.nbytes for size in sizes if size is not None) / self.gate_up.count


def experts_of(shape: MixtureShape, device: torch.device) -> dict[str, Experts]:
    """Random ones of each kind."""
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    biases = [torch.zeros(shape.count, rows, dtype=torch.bfloat16, device=device) for rows, _ in sizes]
    coded, plain = [], []
    for (rows, columns), bias in zip(sizes, biases, strict=True):
        coded.append(pack_experts_decoded((_any_codes(rows, columns, device) for _ in range(shape.count)), bias))
        numbers = torch.randn(shape.count, rows, columns, dtype=torch.bfloat16, device=device)
        plain.append(ExpertWeights(bias=bias, stacked=numbers.mul_(columns**-0.5)))
    return {"MXFP4": Experts(coded[0], coded[1]), "bfloat16": Experts(plain[0], plain[1])}


def _any_codes(rows: int, columns: int, device: torch.device) -> Codes:
    octets = torch.randint(16, (rows, columns), dtype=torch.uint8, device=device)
    scales = torch.full((rows, columns // GROUP), 2.0**-7, device=device)
    return Codes(octets, scales, GROUP, 4, table=E2M1)


def routings(shape: MixtureShape, num_tokens: int, device: torch.device) -> list[Tensor]:
    """Ids [num_tokens, top_k] of experts, each as likely as the others."""
    scores = torch.rand(NUM_ROUTINGS, num_tokens, shape.count, generator=torch.Generator().manual_seed(num_tokens))
    return list(scores.topk(shape.top_k).indices.to(device))


def step(shape: MixtureShape, experts: Experts, ids: list[Tensor]) -> Callable[[], Tensor]:
    """What computes the layer, with another routing at each call."""
    from kernels.triton.experts.experts import experts as mixed

    x = torch.randn(len(ids[0]), shape.hidden, dtype=torch.bfloat16, device=ids[0].device)
    weights, turns = torch.full(ids[0].shape, 1 / shape.top_k, device=ids[0].device), cycle(ids)
    return lambda: mixed(x, next(turns), weights, experts.gate_up, experts.down, "clamped_swiglu", True)


def measure_experts(bandwidth: float) -> list[Result]:
    """`bandwidth`: bytes/s of a copy in the same run."""
    shape, device, lines = GPT_OSS_20B, torch.device("cuda"), []
    kinds = experts_of(shape, device)
    for num_tokens in TOKENS:
        ids = routings(shape, num_tokens, device)
        touched = sum(len(set(one.flatten().tolist())) for one in ids) / len(ids)
        for name, experts in kinds.items():
            taken = seconds_in_graph(step(shape, experts, ids), repeats=NUM_ROUTINGS)
            floor = touched * experts.expert_bytes / bandwidth
            what = f"experts of gpt-oss-20b's shape, {name}, {num_tokens} tokens: of the floor"
            note = f"{taken * 1e6:.1f} us, {touched:.1f} of {shape.count} experts"
            lines.append(Result(what, floor / taken, note=note))
    return lines
