"""Finding tags in text that comes in pieces, and whitespace that belongs to the tags rather than to the text."""

from __future__ import annotations

from collections.abc import Sequence


def split_at(text: str, tag: str) -> tuple[str, bool, str]:
    """What is before `tag`, whether it is there, and the rest: what may be its beginning, where it is not."""
    place = text.find(tag)
    if place >= 0:
        return text[:place], True, text[place + len(tag) :]
    held = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    cut = len(text) - held
    return text[:cut], False, text[cut:]


def split_at_any(text: str, tags: Sequence[str]) -> tuple[str, str, str]:
    """What is before the first of the `tags`, that tag, and the rest.  Without one the tag is empty, and the rest is
    what may be the beginning of one."""
    found = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    if found:
        place, tag = min(found, key=lambda one: one[0])
        return text[:place], tag, text[place + len(tag) :]
    rest = max((split_at(text, tag)[2] for tag in tags), key=len, default="")
    return text[: len(text) - len(rest)], "", rest


class Trimmed:
    """Passes text on without whitespace at its start, and holds back what may be whitespace at its end."""

    def __init__(self, *, at_start: bool) -> None:
        self._at_start = at_start
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if self._at_start:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._at_start = self._at_start and not kept
        return kept

    def cut(self) -> None:
        """A tag is here: whitespace on both sides of it goes with it."""
        self._held = ""
        self._at_start = True

    def flush(self) -> str:
        """The whitespace that turned out to be the text's own end."""
        held, self._held = self._held, ""
        return held
