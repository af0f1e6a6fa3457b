"""What parsers put out: parts of an answer, in order, each a piece of text of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote to itself."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a function; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that was begun last: JSON as the model writes it."""

    text: str


Part = Content | Reasoning | CallBegun | CallArguments
ReadOn = Callable[[list[Part]], bool]  # a parser's state: the method that reads on; False where it needs more text


class Parser(Protocol):
    """Text in, parts out."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""

    def finish(self) -> list[Part]:
        """What was held back, when no more text will come."""


class ArgumentStyle(msgspec.Struct, frozen=True):
    """How arguments are written one by one, where they are not a JSON object."""

    before_key: str = ""
    before_text: str = ""  # between a key and a string
    before_value: str = ""  # between a key and anything else, which is JSON
    after_text: str = ""
    after_value: str = ""
    between: str = ""  # two arguments
    text_ends: bool = True  # strings are bare, and end where `after_text` begins; else they are JSON too


class CallFormat(msgspec.Struct, frozen=True):
    """How calls are written around the names and the arguments, which are JSON objects unless there is a `style`."""

    begin: str  # before the first call's name
    middle: str  # between a name, with its number, and its arguments
    after: str  # behind a call's arguments
    again: str  # before the name of each further call
    end: str = ""  # behind the last call
    quoted: bool = True  # names are JSON strings
    style: ArgumentStyle | None = None
    number: str = ""  # behind a name, before the number of the call in its conversation; empty: calls have none

    def name(self, name: str) -> str:
        """A function's name as a call has it."""
        return msgspec.json.encode(name).decode() if self.quoted else name

    def head(self, name: str, number: int) -> str:
        """What stands before the arguments of a call that has `number` calls before it."""
        return self.name(name) + (f"{self.number}{number}" if self.number else "") + self.middle
