"""Formats that write calls between tags: the heading with the name, which all have, and what differs behind it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec

from services.gateway.http.parsing.reading.calls import CallParser, Schemas
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Part
from services.gateway.http.parsing.reading.scanner import ValueScanner
from services.gateway.http.parsing.reading.text import split_at_any

NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
LEFT_OVER = " \t\r\n`}]"  # between arguments and the closing tag
MAX_HEADING = 256  # characters of a name; more is no call


class Tags(msgspec.Struct, frozen=True):
    """The words of a format.  None of them is a part of another one, unless at another place."""

    begin: tuple[str, ...]  # open a block of calls
    call: str  # before a name; empty where the block has one call only
    name_end: tuple[str, ...]
    call_end: str
    end: tuple[str, ...] = ()  # close a block, where that is not the call's own end


class TaggedParser(CallParser, ABC):
    """What is outside the blocks is content, and so is a block without a name."""

    tags: ClassVar[Tags]

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(schemas)
        self._function = ""  # whose call is under way

    @abstractmethod
    def _begin_arguments(self, parts: list[Part]) -> None:
        """The name is read: set the state that reads on."""

    def _clean(self, heading: str) -> str:
        """The name in what stands before the arguments."""
        return heading.strip()

    def _read_text(self, parts: list[Part]) -> bool:
        before, tag, self._text = split_at_any(self._text, self.tags.begin)
        self._say(before, parts)
        if tag:
            self._raw = [tag]
            self._read = self._read_name if tag == self.tags.call else self._read_head
        return bool(tag)

    def _read_head(self, parts: list[Part]) -> bool:
        """Behind the tag of a block, before that of a call."""
        begin, call = self._read_space(), self.tags.call
        if begin.startswith(call):
            self._raw.append(call)
            self._read, self._text = self._read_name, begin.removeprefix(call)
        elif call.startswith(begin):
            return False
        else:
            self._give_back(parts)
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        before, tag, _ = split_at_any(
            self._text[: MAX_HEADING + len(max(self.tags.name_end, key=len))], self.tags.name_end
        )
        if not tag and len(before) <= MAX_HEADING:
            return False
        name = self._clean(before)
        if not tag or len(before) > MAX_HEADING or not NAME.fullmatch(name):
            self._give_back(parts)
            return True
        self._text = self._text[len(before) + (len(tag) if self._takes(tag) else 0) :]
        self._function, self._raw = name, []
        self._content.cut()
        parts.append(CallBegun(name))
        self._begin_arguments(parts)
        return True

    def _takes(self, tag: str) -> bool:
        """Whether the tag behind a name belongs to the name."""
        return True

    def _read_after(self, _: list[Part]) -> bool:
        """Behind a call: another one of the block, or the block's end."""
        self._text = self._text.lstrip()
        call, ends = self.tags.call, self.tags.end
        if call and self._text.startswith(call):
            self._raw = [call]
            self._read, self._text = self._read_name, self._text.removeprefix(call)
            return True
        for tag in ends:
            if self._text.startswith(tag):
                self._read, self._text = self._read_text, self._text.removeprefix(tag)
                return True
        if any(tag.startswith(self._text) for tag in (call, *ends) if tag):
            return False
        self._read = self._read_text
        return True


class JsonArgumentsParser(TaggedParser):
    """Formats whose arguments are a JSON object; words before it, such as a fence, are dropped."""

    def _begin_arguments(self, _: list[Part]) -> None:
        self._read, self._value, self._behind = self._read_fence, ValueScanner(), self._read_close

    def _end(self, parts: list[Part]) -> None:
        if self._read == self._read_fence:
            parts.append(CallArguments("{}"))
        super()._end(parts)

    def _read_fence(self, parts: list[Part]) -> bool:
        _, tag, self._text = split_at_any(self._text, ("{", self.tags.call_end))
        if tag == "{":
            self._read, self._text = self._read_value, tag + self._text
        elif tag:
            parts.append(CallArguments("{}"))
            self._read = self._read_after
        return bool(tag)

    def _read_close(self, _: list[Part]) -> bool:
        """Behind the arguments, before the tag that closes the call, which a model may forget."""
        return self._read_past(self.tags.call_end, self._read_after, LEFT_OVER)
