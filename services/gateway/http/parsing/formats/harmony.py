"""Harmony, the format of gpt-oss: messages in channels, of which one is for the user, one thinks, and one calls."""

from __future__ import annotations

import re

from services.gateway.http.parsing.reading.calls import CallParser, Schemas
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, CallFormat, Part, Reasoning
from services.gateway.http.parsing.reading.text import Trimmed, split_at_any

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
BUILT_IN = ("python", "browser", "container")  # tools that a server would run; here they are the model's thoughts
FUNCTIONS = "to=functions."
MAX_HEADER = 512


class HarmonyParser(CallParser):
    """Reads all of an answer, reasoning too.  Text outside of messages is content."""

    keeps_special_tokens = True
    form = CallFormat(
        f"{CHANNEL}commentary {FUNCTIONS}", f" <|constrain|>json{MESSAGE}", "",
        f"<|call|>{START}assistant{CHANNEL}commentary {FUNCTIONS}", quoted=False,
    )  # fmt: skip

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(schemas)
        self._body = "content"  # or reasoning, or call
        self._trimmed = Trimmed(at_start=True)
        self._thoughts = 0
        self._is_empty = True  # whether the call under way has arguments yet

    def _end(self, parts: list[Part]) -> None:
        if self._read == self._read_text:
            self._say(self._text, parts)
        elif self._read == self._read_body:
            self._add(self._text, parts)

    def _read_text(self, parts: list[Part]) -> bool:
        before, tag, self._text = split_at_any(self._text, (CHANNEL, START, *ENDS))
        self._say(before, parts)
        if tag in (CHANNEL, START):
            self._read, self._raw = self._read_header, [tag]
        return bool(tag)

    def _read_header(self, parts: list[Part]) -> bool:
        """Up to the message itself."""
        before, tag, _ = split_at_any(self._text[: MAX_HEADER + len(MESSAGE)], (MESSAGE,))
        if not tag and len(before) <= MAX_HEADER:
            return False
        if not tag or len(before) > MAX_HEADER:
            self._give_back(parts)
            return True
        header = "".join(self._raw) + before
        self._text = self._text[len(before) + len(MESSAGE) :]
        self._read, self._raw = self._read_body, []
        self._begin_body(header, parts)
        return True

    def _begin_body(self, header: str, parts: list[Part]) -> None:
        named, recipient = NAMED.search(header), RECIPIENT.search(header)
        channel = named[1] if named else "final"
        is_function = recipient is not None and (FUNCTIONS in header or recipient[1].partition(".")[0] not in BUILT_IN)
        self._trimmed = Trimmed(at_start=True)
        if is_function and recipient is not None:
            self._body, self._is_empty = "call", True
            self._content.cut()
            parts.append(CallBegun(recipient[1]))
        elif channel == "analysis" or recipient is not None:
            self._body = "reasoning"
            self._thoughts += 1
        else:
            self._body = "content"

    def _read_body(self, parts: list[Part]) -> bool:
        before, tag, self._text = split_at_any(self._text, (*ENDS, START))
        self._add(before, parts)
        if not tag:
            return False
        if self._body == "call" and self._is_empty:
            parts.append(CallArguments("{}"))
        self._read, self._raw = (self._read_header, [START]) if tag == START else (self._read_text, [])
        return True

    def _add(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._body == "content":
            self._say(text, parts)
        elif shown := self._trimmed.push(text):
            if self._body == "call":
                self._is_empty = False
                parts.append(CallArguments(shown))
            else:
                gap = "\n" if self._thoughts > 1 else ""
                self._thoughts = 1 if gap else self._thoughts
                parts.append(Reasoning(gap + shown))


class HarmonyAnswer(HarmonyParser):
    """The same where no tools are offered: what the model would call is part of its reasoning."""

    def _begin_body(self, header: str, parts: list[Part]) -> None:
        found: list[Part] = []
        super()._begin_body(header, found)
        if found:
            self._body = "reasoning"
            self._thoughts += 1
