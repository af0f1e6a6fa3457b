"""What every front checks of a request before it makes anything of it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import RequestError
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.packing import pack_tokens
from shared.requests.sampling import too_long

MAX_LABEL_CHARS = 256  # it is in every log line of its request
MAX_TOKENS_PER_MESSAGE = MAX_MESSAGE_BYTES // 8


def check_label(label: str) -> None:
    if len(label) > MAX_LABEL_CHARS:
        raise RequestError(f"label has {len(label)} characters, more than {MAX_LABEL_CHARS}", field="label")


def check_n(n: int, max_n: int, *, field: str = "n") -> None:
    """Raise RequestError on more sequences than may be; before anything is made for each of them."""
    if n > max_n:
        raise RequestError(f"{field} must be at most {max_n}, got {n}", field=field)


def named_tokens(ids: Sequence[int], *, has_logprobs: bool) -> list[int]:
    """Tokens, each once, whose log-probabilities replace those of the likeliest; RequestError without logprobs."""
    if ids and not has_logprobs:
        raise RequestError("logprob_token_ids can only be given with logprobs", field="logprob_token_ids")
    return list(dict.fromkeys(ids))


def packed_prompt(ids: Sequence[int], max_tokens: int) -> bytes:
    """Packed ids; bounded here already, because four bytes an id may outgrow a message that was within bounds."""
    if len(ids) > max_tokens:
        raise too_long("prompt", f"{len(ids)} tokens", f"max_input_length={max_tokens}")
    return pack_tokens(ids)
