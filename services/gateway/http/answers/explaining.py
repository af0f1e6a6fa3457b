"""Where an answer's time went, for a client that asks (`explain`)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from services.gateway.streams.stream import Stream
from shared.explanation import Explanation

Explanations = list[Explanation] | UnsetType


def explanations(streams: Sequence[Stream], wanted: bool | None) -> Explanations:
    """One for each prompt; nothing unless it is `wanted`, and where the deployment keeps no account of time."""
    told = [stream.latency.explanation() for stream in streams if wanted and stream.latency is not None]
    return told or UNSET
