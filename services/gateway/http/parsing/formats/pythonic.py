"""Llama 4's format: the whole answer is a list of Python calls, [f(a="x", b=1), g()]."""

from __future__ import annotations

import re

from services.gateway.http.parsing.reading.calls import CallParser, Schemas
from services.gateway.http.parsing.reading.literal import PYTHON, LiteralScanner, LiteralState
from services.gateway.http.parsing.reading.parts import ArgumentStyle, CallArguments, CallBegun, CallFormat, Part

TAG, END_TAG = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.]*")
MAX_HEADING = 256  # characters of a function's name


class PythonicParser(CallParser):
    """An answer that does not begin with such a list is content; so is what follows it, and a list in which a call
    without arguments by name turns up (`[see(below)]`) from there on."""

    keeps_special_tokens = True
    form = CallFormat("[", "(", ")", ", ", "]", quoted=False, style=ArgumentStyle("", "=", "=", "", "", ", ", False))

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(schemas)
        self._read = self._read_start
        self._name = ""
        self._has_begun = False

    def _end(self, parts: list[Part]) -> None:
        if self._read != self._read_tail:
            self._say("".join(self._raw) + self._text, parts)

    def _read_start(self, parts: list[Part]) -> bool:
        begin = self._read_space()
        if begin.startswith(TAG):
            self._raw.append(TAG)
            self._text = begin.removeprefix(TAG)
        elif begin.startswith("["):
            self._raw.append("[")
            self._read, self._text = self._read_name, begin[1:]
        elif TAG.startswith(begin):
            return False
        else:
            self._give_back(parts)
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        """Up to the bracket behind a function's name, which nothing but white space may stand before."""
        begin = self._read_space()
        found = NAME.match(begin[:MAX_HEADING])
        name = found[0] if found else ""
        behind = begin[len(name) : len(name) + 1]
        if behind == "(" and name:
            self._raw.append(f"{name}(")
            self._name, self._has_begun = name, False
            self._literal = LiteralScanner(PYTHON, ")", "=")
            self._read, self._text = self._read_arguments, begin[len(name) + 1 :]
        elif behind or len(name) >= MAX_HEADING:
            self._give_back(parts)
        else:
            return False
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        rest = self._literal.push(self._text)
        read, self._text = self._text[: len(self._text) - len(rest)], rest
        if not self._has_begun:
            self._raw.append(read)
            if self._literal.num_keys or self._literal.state is LiteralState.DONE:  # before that it may be any text
                self._has_begun, self._raw = True, []
                self._content.cut()
                parts.append(CallBegun(self._name))
        if self._has_begun and (made := self._literal.take()):
            parts.append(CallArguments(made))
        if self._literal.state is LiteralState.DONE:
            self._read = self._read_between
        elif self._literal.state is LiteralState.BROKEN:
            self._give_back(parts)
        return self._literal.ended

    def _read_between(self, parts: list[Part]) -> bool:
        self._text = self._text.lstrip()
        if self._text[:1] in (",", ";"):
            self._read, self._text = self._read_name, self._text[1:]
        elif self._text.startswith("]"):
            self._read, self._text = self._read_tail, self._text[1:]
        elif self._text:
            self._give_back(parts)
        else:
            return False
        return True

    def _read_tail(self, _: list[Part]) -> bool:
        """Behind the list: its closing tag, if there is one."""
        return self._read_past(END_TAG, self._read_text)

    def _give_back(self, parts: list[Part]) -> None:
        """It is no call: that and all that follows is content."""
        self._text = "".join(self._raw) + self._text
        self._read, self._raw = self._read_text, []
