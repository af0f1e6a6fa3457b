"""Mixtures of experts in plain Python and float64, which tests hold the ops against, and inputs for both."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ops.experts.experts import Routing

ROUTINGS = {
    "softmax": Routing("softmax", 2, renormalise=False),
    "softmax, renormalised": Routing("softmax", 4, renormalise=True),
    "softmax, all": Routing("softmax", 12, renormalise=True),
    "softmax of chosen": Routing("softmax_of_chosen", 4, renormalise=False, scale=0.5),
    "one": Routing("softmax", 1, renormalise=True),
    "sigmoid": Routing("sigmoid", 3, renormalise=True),
    "sigmoid, as they are": Routing("sigmoid", 3, renormalise=False, scale=2.5),
    "groups": Routing("sigmoid", 4, renormalise=True, groups=4, kept_groups=2, scale=2.5),
    "groups of all": Routing("sigmoid", 5, renormalise=True, groups=3, kept_groups=3),
    "groups of one": Routing("sigmoid", 2, renormalise=True, groups=12, kept_groups=5),
    "groups by their best": Routing("softmax", 4, renormalise=False, groups=4, kept_groups=2, group_best=1, scale=1.7),
    "sigmoid, groups by their best": Routing("sigmoid", 3, renormalise=True, groups=3, kept_groups=2, group_best=1),
}
COUNT = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits_with_ties(num_tokens: int) -> Tensor:  # [num_tokens, COUNT]
    """Halves, of which many are equal; the first row is all one number, the second has -inf."""
    logits = (normal(num_tokens, COUNT, seed=4) * 2).round() / 2
    logits[0] = 0.5
    logits[1, ::3] = float("-inf")
    return logits


def wanted_route(logits: list[float], routing: Routing, correction: list[float]) -> tuple[list[float], list[int]]:
    """Of one row; a correction of zeros is none."""
    sigmoid = routing.score == "sigmoid"
    scores = [1 / (1 + math.exp(-min(700.0, max(-700.0, one)))) if sigmoid else math.exp(one) for one in logits]
    choice = [a + b for a, b in zip(scores, correction, strict=True)] if sigmoid else logits
    size = len(logits) // routing.groups
    members = [range(group * size, (group + 1) * size) for group in range(routing.groups)]
    best = routing.group_best
    worth = [sum(sorted((choice[one] for one in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(routing.groups), key=lambda group: (-worth[group], group))[: routing.kept_groups]
    allowed = [one for group in kept for one in members[group]]
    ids = sorted(allowed, key=lambda one: (-choice[one], one))[: routing.top_k]
    weights = [scores[one] for one in ids]
    if routing.score == "softmax":
        weights = [one / sum(scores) for one in weights]
    if routing.renormalise or routing.score == "softmax_of_chosen":
        weights = [one / sum(weights) for one in weights]
    return [one * routing.scale for one in weights], ids


class Mixture:
    """Random weights of a layer, and rows for it; expert 0 has no row at all where there are others."""

    def __init__(
        self,
        num_tokens: int,
        *,
        count: int,
        top_k: int,
        hidden: int,
        inner: int,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        self.gated = gated
        width = 2 * inner if gated else inner
        self.x = normal(num_tokens, hidden)
        self.gate_up, self.down = normal(count, width, hidden, seed=1) / 5, normal(count, hidden, inner, seed=2) / 5
        self.gate_up_bias = normal(count, width, seed=3) if bias else None
        self.down_bias = normal(count, hidden, seed=4) if bias else None
        scores = normal(num_tokens, count, seed=5)
        if count > top_k:
            scores[:, 0] = float("-inf")
        self.weights, self.ids = torch.softmax(scores, -1).topk(top_k)

    def wanted(self, kind: str) -> Tensor:  # [num_tokens, hidden] float64
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for row, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist(), strict=True)):
            for one, weight in zip(ids, weights, strict=True):
                inner = self.gate_up[one].double() @ self.x[row].double()
                if self.gate_up_bias is not None:
                    inner += self.gate_up_bias[one]
                found = self.down[one].double() @ activated(inner, kind, self.gated)
                if self.down_bias is not None:
                    found += self.down_bias[one]
                out[row] += weight * found
        return out


def activated(
    inner: Tensor,  # [2 * inner_size] where gated, else [inner_size]; float64
    kind: str,
    gated: bool,
) -> Tensor:  # [inner_size] float64
    gate, up = inner.chunk(2, -1) if gated else (inner, torch.ones_like(inner))
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


SHAPES = {
    "one row": Mixture(1, count=4, top_k=2, hidden=24, inner=40),
    "few rows of many experts": Mixture(3, count=40, top_k=6, hidden=40, inner=18, bias=True),
    "all experts": Mixture(7, count=4, top_k=4, hidden=48, inner=20),
    "one expert": Mixture(5, count=1, top_k=1, hidden=16, inner=16, bias=True),
    "many rows": Mixture(60, count=5, top_k=3, hidden=72, inner=50, bias=True),
    "not gated": Mixture(20, count=6, top_k=2, hidden=33, inner=70, gated=False, bias=True),
}
KINDS = ("silu", "gelu_tanh", "clamped_swiglu")


def kinds(mixture: Mixture) -> tuple[str, ...]:
    return KINDS if mixture.gated else KINDS[:2]
