"""`--where 'ttft > 500ms and (status != OK or evicted > 0)'`: a small language, read by a small parser.

    condition   comparison | not condition | condition and condition | condition or condition | (condition)
    comparison  name operator value;   == != < <= > >=, and ~ for "contains"
    value       a number, with a unit of time or without (us, ms, s, m), or a word, or text in quotes

Times are compared in milliseconds.  What a request does not have makes a comparison false, but for !=.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

Condition = Callable[[Mapping[str, Any]], bool]

MAX_DEPTH = 50
MILLISECONDS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}
OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
TOKEN = re.compile(
    r"""\s*(?:
        (?P<number> [-+]?\d+(?:\.\d+)?) (?P<unit> us|ms|s|m)? \b
      | (?P<operator> <=|>=|==|!=|<|>|=|~)
      | (?P<bracket> [()])
      | (?P<text> "[^"]*"|'[^']*')
      | (?P<word> [A-Za-z_][\w.:/-]*)
    )""",
    re.VERBOSE,
)


class WhereError(ValueError):
    """A condition that cannot be read; its words say where."""


def parse_where(text: str, known: Collection[str]) -> Condition:
    """Raises WhereError, also where a name is not among the `known` ones."""
    return _Parser(text, known).whole()


def check_name(name: str, known: Collection[str]) -> None:
    """Raises WhereError."""
    if name in known:
        return
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise WhereError(f"no request has a field {name!r}; {hint}There are {', '.join(sorted(known))}")


class _Parser:
    def __init__(self, text: str, known: Collection[str]) -> None:
        self._known = known
        self._tokens = list(_tokens(text))
        self._place = 0
        self._depth = 0

    def whole(self) -> Condition:
        condition = self._either()
        if self._place < len(self._tokens):
            raise WhereError(f"expected 'and' or 'or' before {self._tokens[self._place][1]!r}")
        return condition

    def _take(self, *words: str) -> bool:
        """Whether the next token is one of these; if so it is gone."""
        if self._place < len(self._tokens) and self._tokens[self._place][1] in words:
            self._place += 1
            return True
        return False

    def _next(self, *kinds: str) -> tuple[str, Any]:
        if self._place == len(self._tokens):
            raise WhereError(f"expected a {' or '.join(kinds)} at the end")
        kind, value = self._tokens[self._place]
        if kind not in kinds:
            raise WhereError(f"expected a {' or '.join(kinds)}, not {value!r}")
        self._place += 1
        return kind, value

    def _either(self) -> Condition:
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else lambda values: any(part(values) for part in parts)

    def _both(self) -> Condition:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda values: all(part(values) for part in parts)

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise WhereError("the condition is nested too deeply")
        try:
            if self._take("not"):
                inner = self._one()
                return lambda values: not inner(values)
            if self._take("("):
                inner = self._either()
                if not self._take(")"):
                    raise WhereError("a bracket is not closed")
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Condition:
        _, name = self._next("word")
        check_name(name, self._known)
        _, sign = self._next("operator")
        _, wanted = self._next("number", "word", "text")
        if sign == "~":
            return lambda values: str(wanted).lower() in str(values.get(name, "")).lower()
        compare = OPERATORS[sign]
        return lambda values: _compared(compare, values.get(name), wanted)


def _compared(compare: Callable[[Any, Any], bool], value: Any, wanted: Any) -> bool:
    if value is None:
        return compare is operator.ne
    if isinstance(wanted, float) and not isinstance(value, int | float):
        return compare is operator.ne
    return bool(compare(value if isinstance(wanted, float) else str(value), wanted))


def _tokens(text: str) -> list[tuple[str, Any]]:
    tokens: list[tuple[str, Any]] = []
    place = 0
    while place < len(text.rstrip()):
        match = TOKEN.match(text, place)
        if match is None:
            raise WhereError(f"cannot read {text[place:].strip()!r}")
        place = match.end()
        kind = match.lastgroup if match.lastgroup != "unit" else "number"
        value: Any = match[kind or ""]
        if kind == "number":
            value = float(value) * MILLISECONDS[match["unit"] or "ms"]
        elif kind == "text":
            value = value[1:-1]
        tokens.append((kind or "", value))
    return tokens
