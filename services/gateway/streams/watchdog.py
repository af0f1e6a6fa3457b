"""A watchdog for open streams that have been silent for long: their request or their output may have been lost.

The loss of a process is noticed otherwise.  This is for losses without one, as when a network was cut and mended.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.gateway.streams.stream import Stream

PATIENCE = 5.0  # seconds of silence until a stream is sent again; doubles each time, since it may just be queued


class Quiet(msgspec.Struct):
    """How many tokens a stream has, and since when."""

    num_tokens: int
    since: float
    patience: float


class SilenceWatchdog:
    """Compares the number of tokens of every stream with that of the last look."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._quiet: dict[str, Quiet] = {}

    def overdue(self, streams: Iterable[Stream], now: float) -> list[Stream]:
        """The streams that are to be sent again; `streams` are all that are open, and others are forgotten."""
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
