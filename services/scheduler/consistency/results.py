"""Checks that a step's result is what its plan asked for."""

from __future__ import annotations

from services.scheduler.state.replica import Replica
from services.scheduler.state.step import Step
from shared.errors import ProtocolError
from shared.messages import StepResult


class StepLost(ProtocolError):
    """A plan or its answer was lost on the way; neither process is at fault."""


def check_order(replica: Replica, step_id: int) -> bool:
    """Whether a result answers the oldest plan in flight; False where that plan was answered before.

    Raises StepLost where the answer to an older one is missing, ProtocolError where there is no such plan.
    """
    oldest = replica.in_flight[0].step_id if replica.in_flight else replica.num_steps
    if step_id > oldest:
        kind = StepLost if step_id < replica.num_steps else ProtocolError
        raise kind(f"worker {replica.instance} answered step {step_id}, which is not the oldest in flight")
    return step_id == oldest and bool(replica.in_flight)


def asked_of(step: Step, result: StepResult) -> list[int]:
    """Samples that the plan asked for, without those of refused rows.  Raises ProtocolError."""
    if not result.refused_rows:
        return step.num_samples
    asked = list(step.num_samples)
    for refused in result.refused_rows:
        if not 0 <= refused.entry < len(asked):
            raise ProtocolError(f"step {result.step_id}: refused entry {refused.entry} of {len(asked)}")
        asked[refused.entry] = 0
    if len({refused.entry for refused in result.refused_rows}) != len(result.refused_rows):
        raise ProtocolError(f"step {result.step_id}: an entry is refused twice")
    return asked


def check_result(step: Step, result: StepResult, vocab_size: int) -> list[int]:
    """How many samples of each entry can be there.  Raises ProtocolError unless the result has exactly those that the
    plan asked for, and makes sense."""
    asked = asked_of(step, result)
    if step.num_drafts:
        check_verified(step, result, asked)
    elif not _is_as_asked(step, result, asked):
        raise ProtocolError(f"step {result.step_id}: sampled {result.num_sampled}, not what the plan asked for")
    if len(result.sampled_token_ids) != sum(result.num_sampled):
        raise ProtocolError(f"step {result.step_id}: {len(result.sampled_token_ids)} token ids for its samples")
    tokens = result.sampled_token_ids
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ProtocolError(f"step {result.step_id}: a token outside the vocabulary of {vocab_size}")
    if result.num_head_drafts or result.head_draft_ids:
        _check_head_drafts(step, result, vocab_size)
    if len(result.logprobs) not in (0, len(tokens)):
        raise ProtocolError(f"step {result.step_id}: {len(result.logprobs)} log-probabilities for {len(tokens)} tokens")
    if result.refused or result.prompt_logprobs or result.embeddings:
        _check_entries(step, result)
    return asked


def _check_entries(step: Step, result: StepResult) -> None:
    """What few results have."""
    if any(not (0 <= e < len(step.sequences) and result.num_sampled[e] == 0) for e in result.refused):
        raise ProtocolError(f"step {result.step_id}: refuses an entry that it has sampled, or that is not in the plan")
    if any(not 0 <= entry < len(step.sequences) for entry in result.prompt_logprobs):
        raise ProtocolError(f"step {result.step_id}: log-probabilities of a prompt that was not in the step")
    if any(not (0 <= e < len(step.sequences) and result.num_sampled[e]) for e in result.embeddings):
        raise ProtocolError(f"step {result.step_id}: an embedding of an entry that was not computed to its end")


def _check_head_drafts(step: Step, result: StepResult, vocab_size: int) -> None:
    counts, tokens = result.num_head_drafts, result.head_draft_ids
    if len(counts) != len(step.sequences) or min(counts) < 0 or sum(counts) != len(tokens):
        raise ProtocolError(f"step {result.step_id}: {len(tokens)} drafts of a head for counts {counts}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ProtocolError(f"step {result.step_id}: a head drafts a token outside the vocabulary of {vocab_size}")


def _is_as_asked(step: Step, result: StepResult, asked: list[int]) -> bool:
    """Only a sequence with a grammar may lack a sample."""
    if result.num_sampled == asked:
        return True
    if len(result.num_sampled) != len(asked):
        return False
    columns = zip(step.sequences, asked, result.num_sampled, strict=True)
    return all(count == want or (count == 0 and sequence.request.params.is_held) for sequence, want, count in columns)


def check_verified(step: Step, result: StepResult, asked: list[int]) -> None:
    """Raise ProtocolError unless each entry has at most its accepted draft tokens and one more."""
    if len(result.num_sampled) != len(step.sequences):
        raise ProtocolError(f"step {result.step_id}: {len(result.num_sampled)} entries, not {len(step.sequences)}")
    offset = 0
    columns = zip(result.num_sampled, asked, step.drafts, step.sequences, strict=True)
    for count, num_samples, drafts, sequence in columns:
        if count == 0 and sequence.request.params.is_held:
            continue
        if not num_samples <= count <= num_samples * (1 + len(drafts.token_ids)):
            raise ProtocolError(f"step {result.step_id}: sampled {result.num_sampled}, not what the plan asked for")
        accepted = result.sampled_token_ids[offset : offset + count - 1] if count else []
        if accepted != drafts.token_ids[: len(accepted)]:
            raise ProtocolError(f"step {result.step_id}: accepted tokens that were not drafted")
        offset += count
