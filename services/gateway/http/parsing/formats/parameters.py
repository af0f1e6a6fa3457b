"""Formats that write each argument between tags of its own: Qwen3-Coder's, GLM's and DeepSeek V3.2's.

Values are bare text.  A string goes out as it comes; what others are the function's schema says, once they end.
"""

from __future__ import annotations

import json
from typing import ClassVar

import msgspec

from services.gateway.http.parsing.reading.calls import Schemas
from services.gateway.http.parsing.reading.parts import ArgumentStyle, CallArguments, CallFormat, Part
from services.gateway.http.parsing.reading.tagged import MAX_HEADING, TaggedParser, Tags
from services.gateway.http.parsing.reading.text import split_at, split_at_any
from services.gateway.http.parsing.reading.values import as_json, is_always_text, types_of


class Parameter(msgspec.Struct, frozen=True):
    """The tags of one argument."""

    begin: str
    key_end: tuple[str, ...]
    value_begin: str  # behind the key's end and white space; empty where the value begins at once
    value_end: str
    trims: bool = False  # a newline on both sides of a value belongs to the tags
    text_mark: str = ""  # the key's end that says that the value is a string; others say that it is none


class ParametersParser(TaggedParser):
    parameter: ClassVar[Parameter]

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(schemas)
        self._num_arguments = 0
        self._types: frozenset[str] | None = None
        self._pieces: list[str] = []  # of a value that is not text
        self._held = ""  # a newline that may be the value's last
        self._at_start = False

    def _begin_arguments(self, parts: list[Part]) -> None:
        self._read, self._num_arguments = self._read_between, 0
        parts.append(CallArguments("{"))

    def _end(self, parts: list[Part]) -> None:
        if self._read == self._read_between:
            parts.append(CallArguments("}"))
        super()._end(parts)

    def _read_between(self, parts: list[Part]) -> bool:
        """Between arguments: what is no tag of the format is dropped."""
        ends = dict.fromkeys((self.tags.call_end, *self.tags.end))
        _, tag, self._text = split_at_any(self._text, (self.parameter.begin, *ends))
        if tag == self.parameter.begin:
            self._read = self._read_key
        elif tag:
            parts.append(CallArguments("}"))
            self._read = self._read_after if tag == self.tags.call_end and self._has_blocks else self._read_text
        return bool(tag)

    @property
    def _has_blocks(self) -> bool:
        """Whether something may follow a call in its block."""
        return bool(self.tags.end)

    def _read_key(self, parts: list[Part]) -> bool:
        ends = self.parameter.key_end
        before, tag, _ = split_at_any(self._text[: MAX_HEADING + len(max(ends, key=len))], ends)
        if not tag and len(before) <= MAX_HEADING:
            return False
        if not tag or len(before) > MAX_HEADING:
            self._read = self._read_between
            return True
        self._text = self._text[len(before) + len(tag) :]
        self._begin_value(before.strip(), tag, parts)
        return True

    def _begin_value(self, key: str, tag: str, parts: list[Part]) -> None:
        schema = self._schemas.get(self._function, {})
        properties = schema.get("properties")
        known = properties.get(key) if isinstance(properties, dict) else None
        self._types = types_of(known, schema)
        if self.parameter.text_mark:
            self._types = frozenset({"string"}) if tag == self.parameter.text_mark else self._without_text()
        comma = ", " if self._num_arguments else ""
        opening = '"' if is_always_text(self._types) else ""
        parts.append(CallArguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {opening}"))
        self._num_arguments += 1
        self._pieces, self._held, self._at_start = [], "", True
        self._read = self._read_value_begin if self.parameter.value_begin else self._read_bare

    def _without_text(self) -> frozenset[str] | None:
        return (self._types - {"string"} or None) if self._types else None

    def _read_value_begin(self, _: list[Part]) -> bool:
        return self._read_past(self.parameter.value_begin, self._read_bare)

    def _read_bare(self, parts: list[Part]) -> bool:
        before, found, self._text = split_at(self._text, self.parameter.value_end)
        text = self._trimmed(before, is_last=found)
        if not is_always_text(self._types):
            self._pieces.append(text)
        elif text:
            parts.append(CallArguments(_inner(text)))
        if found:
            closing = '"' if is_always_text(self._types) else as_json("".join(self._pieces), self._types)
            parts.append(CallArguments(closing))
            self._read = self._read_between
        return found

    def _trimmed(self, text: str, *, is_last: bool) -> str:
        """Without a newline at the value's start, and one at its end."""
        if not self.parameter.trims:
            return text
        if self._at_start and text:
            self._at_start, text = False, text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        kept = text.removesuffix("\n")
        if is_last:
            self._held = ""
        return kept


def _inner(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Qwen3CoderParser(ParametersParser):
    tags = Tags(("<tool_call>", "<function="), "<function=", (">",), "</function>", ("</tool_call>",))
    parameter = Parameter("<parameter=", (">",), "", "</parameter>", trims=True)
    form = CallFormat(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n<tool_call>\n<function=", quoted=False,
        style=ArgumentStyle("<parameter=", ">\n", ">\n", "\n</parameter>\n", "\n</parameter>\n"),
    )  # fmt: skip


class GlmParser(ParametersParser):
    """GLM-4.5 and later; its calls have no tags beside those of their blocks."""

    tags = Tags(("<tool_call>",), "", ("\n", "<arg_key>", "</tool_call>"), "</tool_call>")
    parameter = Parameter("<arg_key>", ("</arg_key>",), "<arg_value>", "</arg_value>")
    form = CallFormat(
        "<tool_call>", "\n", "</tool_call>", "\n<tool_call>", quoted=False,
        style=ArgumentStyle(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>\n",
        ),
    )  # fmt: skip

    def _read_head(self, parts: list[Part]) -> bool:
        begin = self._read_space()
        self._read = self._read_name if begin else self._read_head
        return bool(begin)

    def _takes(self, tag: str) -> bool:
        return tag == "\n"


class DeepSeekV32Parser(ParametersParser):
    """Tags of DSML; each argument says itself whether it is a string."""

    keeps_special_tokens = True
    tags = Tags(
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), '<｜DSML｜invoke name="', ('">',), "</｜DSML｜invoke>",
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    )  # fmt: skip
    parameter = Parameter(
        '<｜DSML｜parameter name="', ('" string="true">', '" string="false">'), "", "</｜DSML｜parameter>",
        text_mark='" string="true">',
    )  # fmt: skip
    form = CallFormat(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", '<｜DSML｜invoke name="',
        "</｜DSML｜function_calls>", quoted=False,
        style=ArgumentStyle(
            '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "</｜DSML｜parameter>\n",
            "</｜DSML｜parameter>\n",
        ),
    )  # fmt: skip
