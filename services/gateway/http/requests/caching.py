"""What a body says of the prefix cache: a salt of the client's own, and how long its prompt is worth keeping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.access.header import salted
from services.gateway.http.requests.reading import field_error
from shared.messages import RequestHeader

RETENTIONS = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}  # seconds, of prompt_cache_retention
TTL = re.compile(r"(\d{1,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST = 86_400.0  # seconds
MAX_SALT = 1024  # characters


def with_cache_hints(header: RequestHeader, body: Any) -> RequestHeader:
    """Raises RequestError on hints that cannot be read.  A salt of the client's never leaves its tenant's."""
    salt, seconds = getattr(body, "cache_salt", None), retention_of(body)
    if salt is not None:
        if not 0 < len(salt) <= MAX_SALT:
            raise field_error("cache_salt", f"must have 1 to {MAX_SALT} characters")
        header = msgspec.structs.replace(header, cache_salt=salted(header.cache_salt, salt))
    return msgspec.structs.replace(header, retention=seconds) if seconds else header


def retention_of(body: Any) -> float:
    """Seconds; 0 without a wish.  OpenAI's two fields, of which the longer counts."""
    named = getattr(body, "prompt_cache_retention", None)
    if named is not None and named not in RETENTIONS:
        raise field_error("prompt_cache_retention", f"must be in_memory or 24h, got {named[:32]!r}")
    return max(RETENTIONS[named] if named is not None else 0.0, _ttl(getattr(body, "prompt_cache_options", None)))


def _ttl(options: Any) -> float:
    if options is None:
        return 0.0
    if not isinstance(options, Mapping):
        raise field_error("prompt_cache_options", "must be an object")
    given = options.get("ttl")
    if given is None:
        return 0.0
    found = TTL.fullmatch(given) if isinstance(given, str) else None
    seconds = float(int(found[1]) * SECONDS[found[2]]) if found else 0.0
    if not 0 < seconds <= LONGEST:
        what = f"must be a time such as 30m, at most 24h, got {str(given)[:32]!r}"
        raise field_error("prompt_cache_options.ttl", what)
    return seconds
