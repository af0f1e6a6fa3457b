"""An answer as blocks: text, reasoning and calls in the order in which the model wrote them, and how they grow."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Content, Part, Reasoning


class Kind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Block(msgspec.Struct):
    """What the model wrote in one go; `name` is the function's of a call, whose text is its arguments."""

    kind: Kind
    place: int  # among the blocks of its answer
    name: str = ""
    pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Opened(msgspec.Struct, frozen=True):
    block: Block


class Grown(msgspec.Struct, frozen=True):
    block: Block
    text: str


class Closed(msgspec.Struct, frozen=True):
    """The block is whole; or the answer was cut off in it."""

    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """Adds parts up.  Invariant: all blocks but the last are closed, and each change says what was just done to one."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def take(self, parts: Iterable[Part]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            match part:
                case Content(text):
                    self._grow(Kind.TEXT, text, changes)
                case Reasoning(text):
                    self._grow(Kind.REASONING, text, changes)
                case CallBegun(name):
                    self.open(Kind.CALL, changes, name)
                case CallArguments(text):
                    self._add(text, changes)
        return changes

    def open(self, kind: Kind, changes: list[Change], name: str = "") -> None:
        self.close(changes)
        self.all.append(Block(kind, len(self.all), name))
        self._is_open = True
        changes.append(Opened(self.all[-1]))

    def close(self, changes: list[Change]) -> None:
        """The last block, where one is open."""
        if self._is_open:
            self._is_open = False
            changes.append(Closed(self.all[-1]))

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not self._is_open or self.all[-1].kind is not kind:
            self.open(kind, changes)
        self._add(text, changes)

    def _add(self, text: str, changes: list[Change]) -> None:
        self.all[-1].pieces.append(text)
        changes.append(Grown(self.all[-1], text))
