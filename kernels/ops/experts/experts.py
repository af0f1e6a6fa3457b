"""A mixture of experts: which experts a row goes to, and the sum of what they make of it.

    out = sum over ranks r of weights[r] * expert(ids[r])(x),   expert(x) = down(act(gate_up(x)))

The sum goes in the order of rank, in float32, and is rounded once.  Which experts are chosen follows from numbers that
all providers round alike, so that they choose the same ones: scores are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.layers import activation as plain
from kernels.ops.linears import linear as floating
from kernels.ops.linears import linear_int8 as integers
from kernels.ops.linears.decoded_weight import DecodedWeight
from kernels.ops.linears.linear import LinearWeight

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
LEAST_SUM = 1e-20  # by which weights are divided where all scores are zero

Linear = Callable[[Tensor, LinearWeight, Tensor | None], Tensor]
Activate = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a model chooses experts.  Raises ValueError where it means nothing.

    softmax: the largest of a softmax over all.  softmax_of_chosen: the largest logits, and a softmax over those alone.
    sigmoid: of sigmoid(logit) + correction the largest; the correction is not in the weights.  Of experts in groups,
    only those of the best groups are looked at.
    """

    score: str  # of SCORES
    top_k: int
    renormalise: bool  # weights are divided by their sum; those of softmax_of_chosen sum to 1 anyway
    groups: int = 1  # of equally many experts that follow each other; not for softmax_of_chosen
    kept_groups: int = 1  # with the largest sums of their best experts
    group_best: int = 2  # experts of a group that count for that
    scale: float = 1.0  # of the weights, at last

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score is {self.score!r}; it must be one of {', '.join(SCORES)}")
        if self.top_k < 1 or not 1 <= self.kept_groups <= self.groups:
            raise ValueError("top_k and kept_groups must be at least 1, and kept_groups no more than groups")
        most = {"softmax": 1, "softmax_of_chosen": 0, "sigmoid": 2}[self.score]
        if self.groups > 1 and not 1 <= self.group_best <= most:
            raise ValueError("groups are for the best of a softmax, or for the two best of sigmoids")

    def check(self, count: int) -> None:
        """Raises ValueError where there cannot be `count` experts."""
        if count % self.groups or self.top_k > count // self.groups * self.kept_groups:
            raise ValueError(
                f"{self.top_k} of {count} experts cannot be chosen from {self.kept_groups} of {self.groups} groups"
            )


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The same projection of all experts, as a provider wants it: one by one, or as one tensor."""

    linears: tuple[LinearWeight, ...] = ()  # [count] of [out_features, in_features]
    bias: Tensor | None = None  # [count, out_features]
    stacked: Tensor | None = None  # [count, out_features, in_features]
    scales: Tensor | None = None  # [count, out_features] float32, where `stacked` is int8
    decoded: DecodedWeight | None = None  # as one while they are multiplied

    @property
    def count(self) -> int:
        if self.linears:
            return len(self.linears)
        whole = self.stacked if self.decoded is None else self.decoded.codes
        return 0 if whole is None else len(whole)


def pack_experts(
    weights: Sequence[Tensor],  # [count] of [out_features, in_features]
    bias: Tensor | None,  # [count, out_features]
    *,
    pack: Callable[[Tensor], LinearWeight] = floating.pack_linear,
) -> ExpertWeights:
    return ExpertWeights(tuple(map(pack, weights)), bias)


def pack_experts_int8(
    weights: Sequence[Tensor],  # [count] of [out_features, in_features]
    bias: Tensor | None,  # [count, out_features]
) -> ExpertWeights:
    return pack_experts(weights, bias, pack=integers.pack_linear)


def route(
    logits: Tensor,  # [num_tokens, count] float32
    routing: Routing,
    correction: Tensor | None,  # [count] float32
) -> tuple[Tensor, Tensor]:  # weights float32 and ids int64, each [num_tokens, top_k]: by descending choice, then by id
    """Raises ValueError where there cannot be as many experts as there are logits."""
    routing.check(logits.shape[1])
    wide = logits.double()
    if routing.score == "sigmoid":
        scores = wide.sigmoid()
        choice = _within_groups(scores.float() if correction is None else scores.float() + correction, routing)
    else:  # the logits' own order, which no rounding of scores can turn into ties
        scores, choice = torch.softmax(wide, dim=-1), _within_groups(logits, routing)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    chosen = scores.gather(1, ids)
    if routing.renormalise or routing.score == "softmax_of_chosen":
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
    return (chosen * routing.scale).float(), ids


def _within_groups(
    choice: Tensor,  # [num_tokens, count] float32
    routing: Routing,
) -> Tensor:  # [num_tokens, count] float32: -inf in groups that are not kept
    if routing.groups == 1:
        return choice
    grouped = choice.reshape(len(choice), routing.groups, -1)
    worth = grouped.topk(min(routing.group_best, grouped.shape[2]), dim=-1).values.sum(-1)
    dropped = worth.sort(dim=-1, descending=True, stable=True).indices[:, routing.kept_groups :]
    hidden = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, dropped, value=True)
    return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)


def experts(
    x: Tensor,  # [num_tokens, hidden_size]
    ids: Tensor,  # [num_tokens, top_k] int64
    weights: Tensor,  # [num_tokens, top_k] float32
    gate_up: ExpertWeights,  # [count, 2 * inner_size, hidden_size] where gated, else [count, inner_size, hidden_size]
    down: ExpertWeights,  # [count, hidden_size, inner_size]
    kind: str,  # of activation
    gated: bool,
    *,
    linear: Linear = floating.linear,
    linear_int8: Linear = integers.linear,
    activation: Activate = plain.activation,
    gated_activation: Activate = plain.gated_activation,
) -> Tensor:  # [num_tokens, hidden_size]
    """One expert after the other, each with its rows; nothing but the ops that it is given mixes rows."""
    activate = gated_activation if gated else activation

    def project(some: Tensor, packed: ExpertWeights, index: int) -> Tensor:
        weight = packed.linears[index]
        bias = None if packed.bias is None else packed.bias[index]
        return (linear if weight.scales is None else linear_int8)(some, weight, bias)

    top_k = ids.shape[1]
    slots = ids.flatten()  # [num_tokens * top_k]: a slot is a row at one of its experts
    counts = torch.bincount(slots, minlength=gate_up.count).tolist()
    found = x.new_empty(len(slots), x.shape[1])
    for index, own in enumerate(torch.split(slots.argsort(stable=True), counts)):
        if len(own):
            inner = activate(project(x[own // top_k], gate_up, index), kind)
            found[own] = project(inner, down, index)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(top_k):
        total += found[rank::top_k].float() * weights[:, rank, None]
    return total.to(x.dtype)
