"""Streams that nobody works on, because a service was lost: each is asked again once the troupe is complete."""

from __future__ import annotations

from services.gateway.streams.stream import Stream


class PausedStreams:
    """In the order in which they were paused, each with the time since when; what ended meanwhile is left out."""

    def __init__(self) -> None:
        self._paused: dict[str, tuple[Stream, float]] = {}

    def __contains__(self, stream: Stream) -> bool:
        return stream.header.request_id in self._paused

    def add(self, stream: Stream, now: float) -> None:
        """Does nothing to one that is paused already, or has ended."""
        if not stream.ended:
            self._paused.setdefault(stream.header.request_id, (stream, now))

    def discard(self, stream: Stream) -> None:
        self._paused.pop(stream.header.request_id, None)

    def all(self) -> list[Stream]:
        return [stream for stream, _ in self._paused.values() if not stream.ended]

    def overdue(self, now: float, seconds: float) -> list[Stream]:
        """Those that have been paused for longer than `seconds`."""
        return [stream for stream, since in self._paused.values() if now - since > seconds and not stream.ended]
