"""The end of a sequence by its token ids; the detokenizer finds stop strings."""

from __future__ import annotations

from services.scheduler.state.sequence import Sequence
from shared.messages import FinishReason


def finish_of(sequence: Sequence) -> tuple[FinishReason, int | None] | None:
    """Why the sequence ends with its last token, and the token id that is not to be shown; None while it goes on."""
    request, token, length = sequence.request, sequence.token_ids[-1], len(sequence.token_ids)
    if request.params.grammar is not None and token in request.eos_token_ids:
        return FinishReason.STOP, token  # the worker allows it only where the grammar is complete
    if token in request.end_ids and length >= request.min_length:
        return FinishReason.STOP, token
    if length >= request.max_length:
        return FinishReason.LENGTH, None
    return None
