"""What an answer of either kind, whole or streamed, keeps for its request: identity and usage."""

from __future__ import annotations

import time
import uuid
from typing import Any

from msgspec import UNSET, UnsetType

from services.gateway.http.answers.objects import TokenUsage, explanations, usage_of
from services.gateway.http.answers.timing import metrics_of
from services.gateway.http.requests.fields import GenerationBody
from services.gateway.http.requests.reading import field_error
from services.gateway.streams.stream import Stream
from shared.config import GatewaySettings
from shared.messages import SequenceText


def finish_reason(end: SequenceText | None) -> str | None:
    """In the field's words; None where the sequence goes on."""
    return end.finish_reason.value if end is not None and end.finish_reason is not None else None


def identity(prefix: str, model: str) -> dict[str, Any]:
    """The fields that every object of one answer repeats."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


class UsageOptions:
    """Whether the events of a stream say how many tokens there were, and where the time went; options without a stream
    are refused."""

    def __init__(self, body: GenerationBody, settings: GatewaySettings) -> None:
        options = body.stream_options
        if options is not None and not body.stream:
            raise field_error("stream_options", "can only be given with stream")
        forced = settings.enable_force_include_usage
        self._times = settings.enable_per_request_metrics
        self._at_end = bool(options and options.include_usage) or forced
        self._always = forced or bool(self._at_end and options and options.continuous_usage_stats)
        self._explain = body.explain

    def now(self, streams: list[Stream], *, has_output: bool = True) -> TokenUsage | UnsetType | None:
        """The field `usage` of an event in the middle; without output it counts the prompt alone."""
        if self._always:
            return usage_of(streams, has_output=has_output)
        return None if self._at_end else UNSET

    def whole(self, streams: list[Stream]) -> dict[str, Any]:
        """The fields of an answer that is no stream."""
        return {
            "usage": usage_of(streams),
            "metrics": metrics_of(streams) if self._times else UNSET,
            "explanations": explanations(streams, self._explain),
        }

    def last(self, streams: list[Stream]) -> dict[str, Any]:
        """The fields of an event behind all others, which has no choices; empty where it would say nothing."""
        fields = self.whole(streams)
        if not self._at_end:
            fields |= {"usage": UNSET, "metrics": UNSET}
        return {name: value for name, value in fields.items() if value is not UNSET}
