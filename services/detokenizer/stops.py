"""Stop strings: found wherever the text is split, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text in, text that may be shown out, until a stop string is complete.

    Invariant: what was let out and what is held back together are all text so far, and what is held back is the
    longest end of it that begins a stop string.  The string that is complete first wins; of several that end at the
    same character, the first of the list.  One automaton per string (Knuth, Morris, Pratt 1977) takes one character
    at a time, so the work is linear and how the text is split cannot matter.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._lengths = [0] * len(stops)  # per string, how much of it the text ends with
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take more text; return what can be shown now.  Unarmed, a complete string is let pass."""
        for position, character in enumerate(text):
            found = self._step(character)
            if found is not None and armed:
                return self._cut(self._held + text[: position + 1], found)
        shown = self._held + text
        if self._include:
            return shown
        num_held = max(self._lengths, default=0)
        cut = len(shown) - num_held
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """What is still held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every automaton; the first of the strings that are now complete.

        A complete string stays only as its own longest border, so that the invariant holds where it is let pass.
        """
        found = None
        for which, stop in enumerate(self._stops):
            length, fallbacks = self._lengths[which], self._fallbacks[which]
            while length and stop[length] != character:
                length = fallbacks[length]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                length = fallbacks[length]
                found = stop if found is None else found
            self._lengths[which] = length
        return found

    def _cut(self, text: str, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]


def _fallbacks(stop: str) -> list[int]:
    """[l] is the length of the longest proper prefix of stop[:l] that also ends it."""
    table = [0] * (len(stop) + 1)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = table[length]
        if stop[length] == stop[position]:
            length += 1
        table[position + 1] = length
    return table
