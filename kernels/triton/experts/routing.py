"""Which experts a row goes to: one program per row, with the experts of a group in a row of its tile.

The chosen ones are found one after the other; the best among equals is the one with the lowest id.  Scores are float64,
as the reference has them, so that no rounding makes another choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.experts.experts import LEAST_SUM, SCORES, Routing
from kernels.triton.launch import num_warps, power_of_2

SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # places in SCORES
LEAST = tl.constexpr(LEAST_SUM)


def route(
    logits: Tensor,  # [num_tokens, count] float32
    routing: Routing,
    correction: Tensor | None,  # [count] float32
) -> tuple[Tensor, Tensor]:  # weights float32 and ids int64, each [num_tokens, top_k]: by descending choice, then by id
    """Raises ValueError where there cannot be as many experts as there are logits."""
    num_tokens, count = logits.shape
    routing.check(count)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    rows, columns = power_of_2(routing.groups), power_of_2(count // routing.groups)
    choose_experts[(num_tokens,)](
        logits, logits if correction is None else correction, weights, ids, logits.stride(0), routing.scale,
        SCORE=SCORES.index(routing.score), RENORMALISE=routing.renormalise, CORRECTED=correction is not None,
        TOP_K=routing.top_k, LANES=power_of_2(routing.top_k), GROUPS=routing.groups, KEPT=routing.kept_groups,
        GROUP_BEST=routing.group_best, SIZE=count // routing.groups, ROWS=rows, COLUMNS=columns,
        num_warps=num_warps(rows * columns),
    )  # fmt: skip
    return weights, ids


@triton.jit
def choose_experts(
    logits: tl.tensor,  # [num_tokens, GROUPS * SIZE] float32
    correction: tl.tensor,  # [GROUPS * SIZE] float32; read where CORRECTED
    weights: tl.tensor,  # [num_tokens, TOP_K] float32, contiguous
    ids: tl.tensor,  # [num_tokens, TOP_K] int64, contiguous
    stride: int,
    scale: float,
    SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    expert = group * SIZE + member
    left = (group < GROUPS) & (member < SIZE)
    logit = tl.load(logits + row * stride + expert, mask=left, other=float("-inf"))
    wide = logit.to(tl.float64)
    choice = logit
    if SCORE == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-wide))
        choice = score.to(tl.float32)
        if CORRECTED:
            choice += tl.load(correction + expert, mask=left, other=0.0)
    else:
        score = tl.exp(wide - tl.max(tl.max(wide, 1), 0))
        if SCORE == SOFTMAX:
            score = score / tl.sum(tl.sum(score, 1), 0)
    choice = tl.where(left & (choice == choice), choice, float("-inf"))  # what is no number comes last
    if GROUPS > 1:
        left = left & kept_groups(choice, left, member, GROUPS, KEPT, GROUP_BEST, SIZE, ROWS)[:, None]

    lanes = tl.arange(0, LANES)
    chosen_ids = tl.full((LANES,), 0, tl.int64)
    chosen = tl.full((LANES,), 0.0, tl.float64)
    for rank in range(TOP_K):
        best = tl.max(tl.max(tl.where(left, choice, float("-inf")), 1), 0)
        same = left & (choice == best)
        found = tl.min(tl.min(tl.where(same, expert, GROUPS * SIZE - 1), 1), 0)
        taken = expert == found
        chosen_ids = tl.where(lanes == rank, found.to(tl.int64), chosen_ids)
        own = tl.sum(tl.sum(tl.where(taken & (member < SIZE), score, 0.0), 1), 0)
        chosen = tl.where(lanes == rank, own, chosen)
        left = left & (taken == 0)
    if RENORMALISE or SCORE == SOFTMAX_OF_CHOSEN:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0), LEAST)
    inside = lanes < TOP_K
    tl.store(weights + row * TOP_K + lanes, (chosen * scale).to(tl.float32), mask=inside)
    tl.store(ids + row * TOP_K + lanes, chosen_ids, mask=inside)


@triton.jit
def kept_groups(
    choice: tl.tensor,  # [ROWS, COLUMNS] float32
    there: tl.tensor,  # [ROWS, COLUMNS] bool
    member: tl.tensor,  # [1, COLUMNS]
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:  # [ROWS] bool: those with the largest sums of their best, or two best, experts
    worth = tl.max(choice, 1)
    if SIZE > 1 and GROUP_BEST > 1:
        first = tl.min(tl.where(there & (choice == worth[:, None]), member, SIZE), 1)
        worth += tl.max(tl.where(there & (member != first[:, None]), choice, float("-inf")), 1)
    group = tl.arange(0, ROWS)
    left = group < GROUPS
    for _ in range(KEPT):
        best = tl.max(tl.where(left, worth, float("-inf")), 0)
        found = tl.min(tl.where(left & (worth == best), group, ROWS), 0)
        left = left & (group != found)
    return (group < GROUPS) & (left == 0)
