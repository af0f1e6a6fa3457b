"""Whether a step's result is what its plan asked for."""

from __future__ import annotations

from services.scheduler.replica import Step
from services.scheduler.sequence import Sequence
from shared.errors import ProtocolError
from shared.messages import StepResult


def check_result(step: Step, result: StepResult, vocab_size: int) -> None:
    """Raise ProtocolError unless the result has exactly the samples that the plan asked for, and makes sense."""
    if step.num_drafts:
        check_verified(step, result)
    elif not _is_as_asked(step, result):
        raise ProtocolError(f"step {result.step_id}: sampled {result.num_sampled}, not what the plan asked for")
    if len(result.sampled_token_ids) != sum(result.num_sampled):
        raise ProtocolError(f"step {result.step_id}: {len(result.sampled_token_ids)} token ids for its samples")
    tokens = result.sampled_token_ids
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ProtocolError(f"step {result.step_id}: a token outside the vocabulary of {vocab_size}")
    if len(result.logprobs) not in (0, len(tokens)):
        raise ProtocolError(f"step {result.step_id}: {len(result.logprobs)} log-probabilities for {len(tokens)} tokens")
    if any(not (0 <= e < len(step.sequences) and result.num_sampled[e] == 0) for e in result.refused):
        raise ProtocolError(f"step {result.step_id}: refuses what it has sampled, or has not been asked")
    if any(not 0 <= entry < len(step.sequences) for entry in result.prompt_logprobs):
        raise ProtocolError(f"step {result.step_id}: log-probabilities of a prompt that it did not compute")
    if any(not (0 <= e < len(step.sequences) and result.num_sampled[e]) for e in result.embeddings):
        raise ProtocolError(f"step {result.step_id}: an embedding of what it did not compute to its end")


def _is_as_asked(step: Step, result: StepResult) -> bool:
    """Only a sequence with a grammar may lack a sample."""
    if result.num_sampled == step.num_samples:
        return True
    if len(result.num_sampled) != len(step.num_samples):
        return False
    columns = zip(step.sequences, step.num_samples, result.num_sampled, strict=True)
    return all(count == asked or (count == 0 and may_lack_sample(sequence)) for sequence, asked, count in columns)


def may_lack_sample(sequence: Sequence) -> bool:
    return sequence.request.params.grammar is not None


def check_verified(step: Step, result: StepResult) -> None:
    """Raise ProtocolError unless each entry has at most its accepted draft tokens and one more."""
    if len(result.num_sampled) != len(step.sequences):
        raise ProtocolError(f"step {result.step_id}: {len(result.num_sampled)} entries, not {len(step.sequences)}")
    offset = 0
    columns = zip(result.num_sampled, step.num_samples, step.drafts, step.sequences, strict=True)
    for count, num_samples, drafts, sequence in columns:
        if count == 0 and may_lack_sample(sequence):
            continue
        if not num_samples <= count <= num_samples + len(drafts.token_ids):
            raise ProtocolError(f"step {result.step_id}: sampled {result.num_sampled}, not what the plan asked for")
        accepted = result.sampled_token_ids[offset : offset + count - 1] if count else []
        if accepted != drafts.token_ids[: len(accepted)]:
            raise ProtocolError(f"step {result.step_id}: accepted tokens that were not drafted")
        offset += count
