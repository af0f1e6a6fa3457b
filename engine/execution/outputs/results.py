"""What a step made, as the message that says it."""

from __future__ import annotations

import msgspec
from torch import Tensor

from engine.execution.outputs.partial import completed
from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.outputs.scoring import SampledScores, Scored
from shared.messages.steps import RefusedRow, StepPlan, StepResult


class StepOutputs(msgspec.Struct, frozen=True):
    """The results of a step, most of them on their way to the host."""

    sampled: SampledTokens
    scores: SampledScores | None
    prompt_scores: dict[int, Scored]  # by entry
    embeddings: dict[int, Tensor]  # by entry: [hidden_size] float32
    refused: dict[int, str]  # by entry
    num_drafts: list[int]  # of each entry, of the model's head
    draft_ids: list[int]


def make_result(plan: StepPlan, fenced: list[RefusedRow], found: StepOutputs, seconds: float) -> StepResult:
    """Once the step is over."""
    sampled = found.sampled
    result = StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        num_sampled=sampled.counts,
        sampled_token_ids=sampled.token_ids,
        logprobs=[] if found.scores is None else found.scores.read(sampled.yielded),
        prompt_logprobs={entry: scored.read() for entry, scored in found.prompt_scores.items()},
        device_time=seconds,
        refused=found.refused,
        embeddings={entry: vector.numpy().astype("<f4").tobytes() for entry, vector in found.embeddings.items()},
        num_head_drafts=found.num_drafts,
        head_draft_ids=found.draft_ids,
    )
    return completed(result, fenced, len(plan.rows)) if fenced else result


def make_empty_result(plan: StepPlan, fenced: list[RefusedRow], seconds: float) -> StepResult:
    """Of a step that computed nothing."""
    result = StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        num_sampled=[],
        sampled_token_ids=[],
        device_time=seconds if plan.rows else 0.0,
    )
    return completed(result, fenced, len(plan.rows)) if fenced else result
