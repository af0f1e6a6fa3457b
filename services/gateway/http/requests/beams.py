"""Beam search in a body: vLLM's `use_beam_search`, and the knobs of transformers."""

from __future__ import annotations

from services.gateway.http.requests.fields import GenerationBody
from shared.beam import Beam, EarlyStopping
from shared.errors import RequestError

EARLY_STOPPING = {False: EarlyStopping.LIKELY, True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}
KNOBS = ("beam_width", "length_penalty", "early_stopping")


def read_beam(body: GenerationBody, best_of: int | None = None) -> Beam | None:
    """None where the request samples.  The width is `beam_width`, else best_of, else n; ranges are checked later.

    Raises RequestError on knobs without a search, and on a search that is streamed.
    """
    if not body.use_beam_search:
        for name in KNOBS:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} means something with use_beam_search only", field=name)
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
