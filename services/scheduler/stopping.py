"""When a sequence ends, as far as token ids tell; stop strings are the detokenizer's."""

from __future__ import annotations

from services.scheduler.sequence import Sequence
from shared.messages import FinishReason


def finish_of(sequence: Sequence, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Why the sequence ends with its last token, and the token id that is not to be shown; None while it goes on."""
    request, token = sequence.request, sequence.token_ids[-1]
    num_output = sequence.num_output_tokens
    if num_output >= request.params.min_tokens and (token in request.eos_ids or token in request.stop_ids):
        return FinishReason.STOP, token
    if num_output >= request.max_tokens or sequence.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None
