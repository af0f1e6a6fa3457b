"""Reasoning within an output, by the tokens that open and close it: how long it is, and how long it may be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.packing import LANE, pack_tokens


class ReasoningTags(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Token ids.  `forced` begins with one of `ends`: what is written where reasoning has to end."""

    begin: list[int]
    ends: list[list[int]]
    forced: list[int]


class ThinkingBudget(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """At most so many tokens of reasoning, the tags apart; `field` is what the client calls it, for errors."""

    tags: ReasoningTags
    num_tokens: int
    is_open: bool = False  # the output begins within reasoning
    field: str = "thinking_token_budget"


class ReasoningMeter:
    """Follows an output token by token.  Its state is a function of the tokens alone."""

    def __init__(self, tags: ReasoningTags, *, is_inside: bool = False) -> None:
        """`is_inside`: the output begins within reasoning."""
        self.is_inside = is_inside
        self.num_tokens = 0  # of reasoning so far, in all its parts together
        self._tags = tags
        self._longest = max(map(len, (tags.begin, *tags.ends)))
        self._last: tuple[int, ...] = ()  # tokens behind the last tag, as many as a tag may have

    def copy(self) -> ReasoningMeter:
        found = ReasoningMeter(self._tags, is_inside=self.is_inside)
        found.num_tokens, found._last = self.num_tokens, self._last
        return found

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._last = (*self._last, token_id)[-self._longest :]
            if self.is_inside:
                self._think()
            elif self._ends_with(self._tags.begin):
                self.is_inside, self._last = True, ()

    def _think(self) -> None:
        self.num_tokens += 1
        for end in self._tags.ends:
            if self._ends_with(end):
                self.num_tokens -= len(end)
                self.is_inside, self._last = False, ()
                return

    def _ends_with(self, tag: Sequence[int]) -> bool:
        return self._last[-len(tag) :] == tuple(tag)

    def num_begun(self, tag: Sequence[int]) -> int:
        """How many tokens of a tag stand at the end already."""
        lengths = range(min(len(tag) - 1, len(self._last)), 0, -1)
        return next((length for length in lengths if self._last[-length:] == tuple(tag[:length])), 0)


def is_left_open(prompt: bytes, tags: ReasoningTags) -> bool:
    """Whether a prompt of packed ids ends within reasoning."""
    begin = _last_place(prompt, tags.begin)
    return begin >= 0 and begin > max(_last_place(prompt, end) for end in tags.ends)


def _last_place(prompt: bytes, tag: Sequence[int]) -> int:
    """Where it begins for the last time, in bytes; -1: nowhere."""
    wanted = pack_tokens(tag)
    place = prompt.rfind(wanted)
    while place >= 0 and place % LANE:  # across the bounds of ids
        place = prompt.rfind(wanted, 0, place + len(wanted) - 1)
    return place
