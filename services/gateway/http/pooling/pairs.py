"""The pairs of texts that a body asks scores for."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.generation.embedding import MAX_INPUTS
from services.gateway.http.conversation.objects import ContentPart
from services.gateway.http.conversation.prompt import content_of
from services.gateway.http.pooling.objects import PairFields, ScoreBody
from services.gateway.http.requests.reading import field_error, not_valid
from shared.errors import RequestError

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def check_pair_fields(body: PairFields) -> None:
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if (getattr(body, name) or 0) < 0:
            raise field_error(name, "must be a non-negative integer")


def read_pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """Raises RequestError unless both sides are there under one pair of names, and fit each other."""
    every = dict.fromkeys(name for pair in NAMES for name in pair)
    given = {name for name in every if getattr(body, name) is not None}
    names = next((pair for pair in NAMES if set(pair) == given), None)
    if names is None:
        pairs = ", or ".join(" and ".join(pair) for pair in NAMES)
        raise RequestError(f"exactly two texts or lists must be given: {pairs}", field="text_1")
    first, second = (read_texts(getattr(body, name), name) for name in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise field_error(names[0], f"must have one entry, or as many as {names[1]} ({len(second)}), got {len(first)}")
    return list(zip(first, second, strict=True))


def read_texts(given: Any, field: str) -> list[str]:
    many = given if isinstance(given, list) else [given]
    if not 1 <= len(many) <= MAX_INPUTS:
        raise field_error(field, f"must have between 1 and {MAX_INPUTS} entries, got {len(many)}")
    return [read_text(one, f"{field}[{place}]" if many is given else field) for place, one in enumerate(many)]


def read_text(given: Any, field: str) -> str:
    """Raises RequestError on what is not text."""
    if isinstance(given, dict) and isinstance(given.get("text"), str):
        given = given["text"]
    elif isinstance(given, dict) and "content" in given:
        given = content_of(_parts(given["content"], field), f"{field}.content")
    if not isinstance(given, str) or not given:
        raise field_error(field, "must be a text that is not empty")
    return given


def _parts(given: Any, field: str) -> str | list[ContentPart]:
    try:
        return msgspec.convert(given, str | list[ContentPart])
    except msgspec.ValidationError as error:
        raise not_valid(error, f"{field}.content") from None
