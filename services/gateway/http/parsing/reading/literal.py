"""Literals that are nearly JSON, read as they come and put out as JSON: Python's, and those of Gemma."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

import msgspec

from services.gateway.http.parsing.reading.text import split_at_any

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
END_OF_WORD = re.compile(r"[\s,:=()\[\]{}'\"<]")
KEY = re.compile(r"[A-Za-z_][\w.-]*")
NO_SPACE = re.compile(r"\S")
SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "b": "\b", "f": "\f", "0": "\0", "\n": ""}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of an escape
BRACKETS = {"[": "]", "(": ")", "{": "}"}
MAX_DEPTH = 64
MAX_WORD = 256


class Notation(msgspec.Struct, frozen=True):
    """What differs between the two."""

    quotes: tuple[str, ...]
    escapes: bool  # a backslash in a string begins an escape


PYTHON = Notation(("'", '"'), escapes=True)


class LiteralState(Enum):
    """What comes next."""

    KEY = auto()
    WORD_KEY = auto()
    SIGN = auto()  # the colon or equals sign behind a key
    VALUE = auto()
    WORD = auto()
    TEXT = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class LiteralScanner:
    """Reads one mapping from behind its opening bracket up to its closing one; `json` is what it has made so far.

    What it makes depends on the text alone, as with all parsers here, and once `broken` it reads no more.
    """

    def __init__(self, notation: Notation, close: str, sign: str = ":") -> None:
        """`close`: ends the mapping, `sign`: stands between its keys and values."""
        self.state = LiteralState.KEY
        self.num_keys = 0
        self._notation = notation
        self._stack = [(close, sign)]  # of open brackets; the sign is empty for lists
        self._made = ["{"]
        self._word = ""
        self._quote = ""
        self._is_key = False
        self._comma = ""  # before the next item, once there is one

    @property
    def ended(self) -> bool:
        return self.state in (LiteralState.DONE, LiteralState.BROKEN)

    def take(self) -> str:
        """The JSON since the last time."""
        made = "".join(self._made)
        self._made.clear()
        return made

    def push(self, text: str) -> str:
        """Read on; returns what is not read: what is behind the mapping, or too little to decide on."""
        while text and not self.ended:
            before = (self.state, len(text))
            text = self._step(text)
            if (self.state, len(text)) == before:
                break
        return text

    def _step(self, text: str) -> str:
        if self.state is LiteralState.TEXT:
            return self._read_text(text)
        if self.state in (LiteralState.WORD, LiteralState.WORD_KEY):
            return self._read_word(text)
        found = NO_SPACE.search(text)
        if found is None:
            return ""
        return self._read_sign(text[found.start() :])

    def _read_sign(self, text: str) -> str:
        """One character, or a quotation mark, outside of words and strings."""
        char, (close, sign) = text[0], self._stack[-1]
        if self.state is LiteralState.AFTER and char == ",":
            self._comma, self.state = ", ", LiteralState.KEY if sign else LiteralState.VALUE
        elif char == close and (
            self.state in (LiteralState.AFTER, LiteralState.KEY) or (self.state is LiteralState.VALUE and not sign)
        ):
            self._close(is_map=bool(sign))
        elif self.state is LiteralState.SIGN and char == sign:
            self._made.append(": ")
            self.num_keys += 1
            self.state = LiteralState.VALUE
        elif self.state in (LiteralState.KEY, LiteralState.VALUE):
            return self._begin(text)
        else:
            self.state = LiteralState.BROKEN
            return text
        return text[1:]

    def _begin(self, text: str) -> str:
        """A key or a value."""
        self._is_key = self.state is LiteralState.KEY
        for quote in self._notation.quotes:
            if text.startswith(quote):
                self._emit('"')
                self._quote, self.state = quote, LiteralState.TEXT
                return text[len(quote) :]
            if quote.startswith(text):
                return text
        char = text[0]
        if not self._is_key and char in BRACKETS:
            if len(self._stack) >= MAX_DEPTH:
                self.state = LiteralState.BROKEN
                return text
            is_map = char == "{"
            self._emit("{" if is_map else "[")
            self._stack.append((BRACKETS[char], ":" if is_map else ""))
            self._comma, self.state = "", LiteralState.KEY if is_map else LiteralState.VALUE
            return text[1:]
        if END_OF_WORD.match(char):
            self.state = LiteralState.BROKEN
            return text
        self._word, self.state = "", LiteralState.WORD_KEY if self._is_key else LiteralState.WORD
        return text

    def _emit(self, made: str) -> None:
        self._made.append(self._comma + made)
        self._comma = ""

    def _close(self, *, is_map: bool) -> None:
        self._stack.pop()
        self._made.append("}" if is_map else "]")
        self._comma, self.state = "", LiteralState.AFTER if self._stack else LiteralState.DONE

    def _read_word(self, text: str) -> str:
        found = END_OF_WORD.search(text)
        self._word += text[: found.start()] if found else text
        if len(self._word) > MAX_WORD:
            self.state = LiteralState.BROKEN
            return ""
        if found is None:
            return ""
        if self.state is LiteralState.WORD_KEY:
            self.state = LiteralState.SIGN if KEY.fullmatch(self._word) else LiteralState.BROKEN
            if self.state is LiteralState.SIGN:
                self._emit(_quoted(self._word))
        else:
            self._emit(WORDS.get(self._word) or (self._word if NUMBER.fullmatch(self._word) else _quoted(self._word)))
            self.state = LiteralState.AFTER
        return text[found.start() :]

    def _read_text(self, text: str) -> str:
        marks = (self._quote, "\\") if self._notation.escapes else (self._quote,)
        before, mark, rest = split_at_any(text, marks)
        self._made.append(_quoted(before)[1:-1])
        if mark == "\\":
            size = 2 + CODES.get(rest[:1], 0)
            if len(rest) + 1 < size:
                return "\\" + rest
            self._made.append(_quoted(_unescaped(rest[: size - 1]))[1:-1])
            return rest[size - 1 :]
        if mark:
            self._made.append('"')
            self.state = LiteralState.SIGN if self._is_key else LiteralState.AFTER
        return rest


def _unescaped(escape: str) -> str:
    """What stands behind a backslash, as Python reads it; what is no escape stays as it is."""
    if escape[0] in SIMPLE:
        return SIMPLE[escape[0]]
    if escape[0] in CODES:
        try:
            char = chr(int(escape[1:], 16))
            return char if char.isprintable() or not "\ud800" <= char <= "\udfff" else "\ufffd"
        except (ValueError, OverflowError):
            pass
    return "\\" + escape


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def python_as_json(text: str) -> str | None:
    """A Python list or dict as JSON; None where it is none."""
    scanner = LiteralScanner(PYTHON, ")", "=")
    rest = scanner.push(f"x={text})")
    made = scanner.take()
    return made.removeprefix('{"x": ').removesuffix("}") if scanner.state is LiteralState.DONE and not rest else None
