"""Beam search as a request asks for it: what a client may say, and what cannot be said beside it."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from shared.errors import RequestError

MAX_LENGTH_PENALTY = 10.0  # either way; the longest sequences to a higher power leave what a float can hold


class EarlyStopping(StrEnum):
    """When a search is over, once it has as many finished sequences as it is wide."""

    LIKELY = "likely"  # no beam is better than the worst of them, as long as it is now
    FIRST = "first"  # at once
    NEVER = "never"  # no beam can become better than the worst of them, however long it grows


class Beam(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A search of `width` sequences; the n best are the answer, by log-probability / length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.LIKELY


def check_beam(beam: Beam, *, n: int, max_width: int, vocab_size: int) -> None:
    """Raise RequestError unless such a search is possible here, and has n sequences to give."""
    if not 1 <= beam.width <= max_width:
        raise _bad("beam_width", f"must be in [1, {max_width}], got {beam.width}")
    if n > min(beam.width, vocab_size):
        raise _bad("n", f"must be at most beam_width={beam.width} and the vocabulary's size, got {n}")
    if not (math.isfinite(beam.length_penalty) and abs(beam.length_penalty) <= MAX_LENGTH_PENALTY):
        limit = MAX_LENGTH_PENALTY
        raise _bad("length_penalty", f"must be in [-{limit:g}, {limit:g}], got {beam.length_penalty}")


def refuse_beside_beam(field: str) -> RequestError:
    return _bad(field, "cannot be given with beam search")


def _bad(field: str, message: str) -> RequestError:
    return RequestError(f"{field} {message}", field=field)
