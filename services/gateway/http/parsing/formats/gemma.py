"""Gemma's formats: call:NAME{key:value,...} between tags, with marks of their own around strings."""

from __future__ import annotations

from typing import ClassVar

from services.gateway.http.parsing.reading.literal import LiteralScanner, LiteralState, Notation
from services.gateway.http.parsing.reading.parts import ArgumentStyle, CallArguments, CallFormat, Part
from services.gateway.http.parsing.reading.tagged import TaggedParser, Tags
from services.gateway.http.parsing.reading.text import split_at


class GemmaParser(TaggedParser):
    keeps_special_tokens = True
    notation: ClassVar[Notation]

    def _begin_arguments(self, _: list[Part]) -> None:
        self._read, self._literal = self._read_arguments, LiteralScanner(self.notation, "}")

    def _read_arguments(self, parts: list[Part]) -> bool:
        self._text = self._literal.push(self._text)
        if made := self._literal.take():
            parts.append(CallArguments(made))
        if self._literal.ended:
            self._read = self._read_close if self._literal.state is LiteralState.DONE else self._skip
        return self._literal.ended

    def _read_close(self, _: list[Part]) -> bool:
        return self._read_past(self.tags.call_end, self._read_text)

    def _skip(self, _: list[Part]) -> bool:
        """Arguments that went wrong: all up to the closing tag is lost."""
        _before, found, self._text = split_at(self._text, self.tags.call_end)
        if found:
            self._read = self._read_text
        return found


class FunctionGemmaParser(GemmaParser):
    tags = Tags(("<start_function_call>",), "call:", ("{",), "<end_function_call>")
    notation = Notation(("<escape>",), escapes=False)
    form = CallFormat(
        "<start_function_call>call:", "{", "}<end_function_call>", "<start_function_call>call:", quoted=False,
        style=ArgumentStyle("", ":<escape>", ":", "<escape>", "", ","),
    )  # fmt: skip


class Gemma4Parser(GemmaParser):
    tags = Tags(("<|tool_call>",), "call:", ("{",), "<tool_call|>")
    notation = Notation(('<|"|>',), escapes=False)
    form = CallFormat(
        "<|tool_call>call:", "{", "}<tool_call|>", "<|tool_call>call:", quoted=False,
        style=ArgumentStyle("", ':<|"|>', ":", '<|"|>', "", ","),
    )  # fmt: skip
