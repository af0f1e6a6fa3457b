"""From a body's fields to SamplingParams.  What cannot be done is refused by name, nothing is dropped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from services.gateway.generation.checks import named_tokens
from services.gateway.http.requests.fields import GenerationBody, refused_fields
from services.gateway.http.requests.output_format import output_grammar
from services.gateway.http.requests.reading import field_error
from shared.errors import RequestError
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.sampling import SamplingParams

SAME = (
    "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed", "allowed_token_ids",
    "bad_words", "stop_token_ids", "speculate",
)  # fmt: skip
NOTHING: tuple[Any, ...] = (None, False, "", {})  # what a field says nothing with
EARLY_STOPPING = {False: EarlyStopping.LIKELY, True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
SHOWN_KEYS = 8  # of those that are wrong
MAX_BIAS = 100.0  # OpenAI's bound; more has no more effect


def refuse_impossible(
    body: msgspec.Struct, *, served: Collection[str] = (), nothing: Collection[Any] = NOTHING
) -> None:
    """Raise RequestError on fields whose meaning this server does not have, unless they say `nothing`, or are `served`
    by this endpoint."""
    for name, what in refused_fields(type(body)).items():
        if name not in served and getattr(body, name) not in nothing:
            raise RequestError(f"{name}: {what} is not supported by this server", field=name)
    if getattr(body, "truncation_side", None) not in (None, "left", "right"):
        raise field_error("truncation_side", "must be left or right")
    if (getattr(body, "modalities", None) or ["text"]) != ["text"]:
        raise field_error("modalities", "can only be text")


def sampling_params(body: GenerationBody, *, closes: bool = False, **given: Any) -> SamplingParams:
    """`given` wins over the body's own fields, for those whose name or meaning differs between endpoints."""
    values: dict[str, Any] = {name: getattr(body, name) for name in (*SAME, "n", "prompt_logprobs")}
    values |= {"grammar": output_grammar(body, closes=closes)} | given
    values["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    values["logit_bias"] = _biases(body.logit_bias or {})
    wanted = getattr(body, "logprobs", None)  # true in a chat; a number in a completion, which may be 0
    has_logprobs = wanted is not None and wanted is not False
    if named := named_tokens(body.logprob_token_ids or (), has_logprobs=has_logprobs):
        values |= {"logprobs": len(named), "logprob_token_ids": named}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _biases(biases: dict[str, float]) -> dict[int, float]:
    """JSON has no integer keys; ids are checked against the vocabulary later, with all others."""
    wrong = [key for key in biases if not (key.isascii() and key.isdecimal() and len(key) < 10)]
    if wrong:
        names = ", ".join(repr(key[:32]) for key in wrong[:SHOWN_KEYS])
        keys = f"the key {names}, which is no token id" if len(wrong) == 1 else f"keys that are no token ids: {names}"
        raise field_error("logit_bias", f"has {keys}")
    return {int(key): max(-MAX_BIAS, min(MAX_BIAS, bias)) for key, bias in biases.items()}


def read_beam(body: GenerationBody, best_of: int | None = None) -> Beam | None:
    """None where the request samples.  The width is `beam_width`, else best_of, else n; ranges are checked later.

    Raises RequestError on fields of a search without one, and on a search that is streamed.
    """
    if not body.use_beam_search:
        for name in BEAM_FIELDS:
            if getattr(body, name) is not None:
                raise field_error(name, "can only be given with use_beam_search")
        return None
    if body.stream:
        raise RequestError("a beam search cannot be streamed: its answer is known at the end", field="stream")
    width = next((count for count in (body.beam_width, best_of, body.n) if count is not None), 1)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Beam(width, penalty, _early_stopping(body.early_stopping))


def _early_stopping(given: bool | str | None) -> EarlyStopping:
    if given is None:
        return EarlyStopping.LIKELY
    if given not in EARLY_STOPPING:
        raise RequestError('early_stopping must be true, false or "never"', field="early_stopping")
    return EARLY_STOPPING[given]
