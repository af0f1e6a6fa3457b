"""Reading JSON as it comes: where a value ends, and what a call object says, before all of it is there."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any

import msgspec

from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Part

IN_STRING = re.compile(r'["\\]')
IN_CONTAINER = re.compile(r'["{}\[\]]')
END_OF_SCALAR = re.compile(r"[\s,}\]]")
NO_SPACE = re.compile(r"\S")


class ValueScanner:
    """Finds the end of one JSON value, which begins with the first character that it is given.

    It counts brackets and knows strings; whether the value is well formed is not its business.
    """

    def __init__(self) -> None:
        self.done = False
        self._first = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_object(self) -> bool:
        return self._first == "{"

    def push(self, text: str, start: int) -> int:
        """Read from `start` on; returns where reading ended, which is behind the value once it is `done`."""
        position = start
        if not self._first and position < len(text):
            self._first = text[position]
        while position < len(text) and not self.done:
            position = self._string(text, position) if self._in_string else self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        if self._first not in '{["':
            return self._scalar(text, position)
        found = IN_CONTAINER.search(text, position)
        if found is None:
            return len(text)
        char = found[0]
        if char == '"':
            self._in_string = True
        else:
            self._depth += 1 if char in "{[" else -1
            self.done = self._depth <= 0
        return found.end()

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        found = IN_STRING.search(text, position)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _scalar(self, text: str, position: int) -> int:
        found = END_OF_SCALAR.search(text, position)
        self.done = found is not None
        return found.start() if found else len(text)


class State(Enum):
    """What comes next in a call object."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()
    BROKEN = auto()  # it is no call, or no JSON


class CallScanner:
    """Reads one `{"name": ..., "arguments": {...}}`, keys in any order.

    Invariant: `parts` holds the call's beginning once the name is known and arguments have begun (or the object has
    ended without any), then the arguments as they come.  `begun` tells which: what has begun cannot be taken back.
    """

    def __init__(self, *, only: frozenset[str] | None = None) -> None:
        self.state = State.OPEN
        self.begun = False
        self.parts: list[Part] = []
        self._only = only
        self._name: str | None = None
        self._key = ""
        self._value: ValueScanner | None = None
        self._raw: list[str] = []  # of the key or value under way, where it is not streamed
        self._arguments: list[str] = []  # that wait for the name
        self._has_arguments = False

    @property
    def ended(self) -> bool:
        return self.state in (State.DONE, State.BROKEN)

    def push(self, text: str) -> int:
        """Read as far as the object goes; returns the number of characters that are its own."""
        position = 0
        while position < len(text) and not self.ended:
            if self._value is not None:
                position = self._go_on(text, position)
                continue
            found = NO_SPACE.search(text, position)
            if found is None:
                return len(text)
            position = self._punctuation(found[0], found.start(), text)
        return position

    def take(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    def _punctuation(self, char: str, position: int, text: str) -> int:
        """One character between keys and values; what may not be there breaks the object, and is not read."""
        match self.state, char:
            case (State.OPEN, "{"):
                self.state = State.KEY
            case (State.KEY | State.COMMA, "}"):
                self._end()
            case (State.COMMA, ","):
                self.state = State.KEY
            case (State.COLON, ":"):
                self.state = State.VALUE
            case (State.KEY, '"') | (State.VALUE, _):
                self._value = ValueScanner()
                return self._go_on(text, position)
            case _:
                self.state = State.BROKEN
                return position
        return position + 1

    def _go_on(self, text: str, position: int) -> int:
        assert self._value is not None
        end = self._value.push(text, position)
        read = text[position:end]
        streamed = self._streams(self._value)
        if streamed:
            self._argue(read)
        else:
            self._raw.append(read)
        if self._value.done:
            self._value = None
            raw, self._raw = "".join(self._raw), []
            self._complete(raw, streamed=streamed)
        return end

    def _streams(self, value: ValueScanner) -> bool:
        """Whether the value under way is the arguments, which go out as they come."""
        return self.state is State.VALUE and self._key in ARGUMENTS and value.is_object and not self._has_arguments

    def _complete(self, raw: str, *, streamed: bool) -> None:
        if self.state is State.KEY:
            key = _decoded(raw)
            known = isinstance(key, str) and (self._only is None or key in self._only)
            self._key = key if known else ""
            self.state = State.COLON if known else State.BROKEN
            return
        self.state = State.COMMA
        if self._key in ARGUMENTS:
            if not (streamed or self._has_arguments):
                self._argue(_arguments_of(raw))
            self._has_arguments = True
        elif self._key == "name" and self._name is None:
            self._name_it(_decoded(raw))

    def _name_it(self, name: Any) -> None:
        if not isinstance(name, str) or not name:
            self.state = State.BROKEN
            return
        self._name = name
        if self._arguments:
            waiting, self._arguments = "".join(self._arguments), []
            self._argue(waiting)

    def _argue(self, text: str) -> None:
        if self._name is None:
            self._arguments.append(text)
            return
        self._begin(self._name)
        self.parts.append(CallArguments(text))

    def _begin(self, name: str) -> None:
        if not self.begun:
            self.begun = True
            self.parts.append(CallBegun(name))

    def _end(self) -> None:
        self.state = State.DONE
        if self._name is None:
            self.state = State.BROKEN
        elif not self.begun:
            self._argue("{}")


ARGUMENTS = ("arguments", "parameters")


def _decoded(raw: str) -> Any:
    """A JSON value, None where it is none."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _arguments_of(raw: str) -> str:
    """Arguments that are no object: some models write the object as a string, or null for none."""
    value = _decoded(raw)
    if value is None:
        return "{}" if raw == "null" else raw
    return (value.strip() or "{}") if isinstance(value, str) else raw
