"""Which open streams have said nothing for long: then their request or their output may have been lost on its way.

Losses that end a process are noticed otherwise; this is for those that do not, as when a network was cut and mended.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.gateway.streams.stream import Stream

PATIENCE = 5.0  # seconds until a silent stream is asked after; doubles each time, for it may just have to wait


class Quiet(msgspec.Struct):
    """Since when a stream has had as many tokens as it has."""

    num_tokens: int
    since: float
    patience: float


class Silence:
    """Compares every stream with itself, now and then."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._quiet: dict[str, Quiet] = {}

    def overdue(self, streams: Iterable[Stream], now: float) -> list[Stream]:
        """Those to be asked after now; `streams` are all that are open, and others are forgotten."""
        before, self._quiet = self._quiet, {}
        found = []
        for stream in streams:
            request_id, num_tokens = stream.header.request_id, stream.num_output_tokens
            quiet = before.get(request_id)
            if quiet is None or quiet.num_tokens != num_tokens:
                quiet = Quiet(num_tokens, now, self._patience)
            elif now - quiet.since > quiet.patience and not stream.ended:
                quiet = Quiet(num_tokens, now, 2 * quiet.patience)
                found.append(stream)
            self._quiet[request_id] = quiet
        return found
