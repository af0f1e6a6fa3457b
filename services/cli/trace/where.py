"""`--where 'ttft > 500ms and (status != OK or evicted > 0)'`: comparisons, joined by `and`, `or`, `not` and brackets.

    comparison  name operator value;   = == != < <= > >=, and ~ for "contains"
    value       a number, with a unit of time or without (us, ms, s, m), or a word, or text in quotes

Times are compared in milliseconds.  A comparison with a field that a request lacks is false, except !=.  Python's own
parser reads how comparisons are joined; nothing of the text is evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

Condition = Callable[[Mapping[str, Any]], bool]

MILLISECONDS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}
OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "==": operator.eq,
    "!=": operator.ne, "~": lambda value, wanted: str(wanted).lower() in str(value).lower(),
}  # fmt: skip
COMPARISON = re.compile(
    r"""\b(?P<name> [A-Za-z_]\w*) \s* (?P<operator> <=|>=|==|!=|<|>|=|~) \s* (?:
        (?P<number> [-+]?\d+(?:\.\d+)?) (?P<unit> us|ms|s|m)? \b
      | (?P<text> "[^"]*" | '[^']*')
      | (?P<word> [A-Za-z_][\w.:/-]*)
    )""",
    re.VERBOSE,
)
JOINTS = re.compile(r"(?: \s | [()] | \b(?:and|or|not)\b )*", re.VERBOSE)


class WhereError(ValueError):
    """A condition that cannot be read."""


def parse_where(text: str, known: Collection[str]) -> Condition:
    """Raises WhereError, also where a name is not among the `known` ones."""
    parts = list(COMPARISON.finditer(text))
    for part in parts:
        check_name(part["name"], known)
    if JOINTS.fullmatch(COMPARISON.sub(" ", text)) is None:
        raise WhereError(f"cannot read {text!r}: expected comparisons like `ttft > 500ms`, joined by and, or, not")
    numbers = iter(range(len(parts)))
    joined = COMPARISON.sub(lambda part: f" _{next(numbers)} ", text)  # `_3` is the comparison numbered 3
    try:
        return _joined(ast.parse(joined.strip(), mode="eval").body, [_comparison(part) for part in parts])
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise WhereError(f"cannot read {text!r}: {getattr(error, 'msg', 'it is nested too deeply')}") from error


def check_name(name: str, known: Collection[str]) -> None:
    """Raises WhereError."""
    if name in known:
        return
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise WhereError(f"no request has a field {name!r}; {hint}There are {', '.join(sorted(known))}")


def _joined(node: ast.expr, comparisons: list[Condition]) -> Condition:
    if isinstance(node, ast.Name):
        return comparisons[int(node.id[1:])]
    if isinstance(node, ast.UnaryOp):
        inner = _joined(node.operand, comparisons)
        return lambda values: not inner(values)
    if not isinstance(node, ast.BoolOp):
        raise WhereError("comparisons must be joined by and, or, not")
    parts = [_joined(value, comparisons) for value in node.values]
    combine = all if isinstance(node.op, ast.And) else any
    return lambda values: combine(part(values) for part in parts)


def _comparison(part: re.Match[str]) -> Condition:
    name, compare = part["name"], OPERATORS[part["operator"]]
    is_number = part["number"] is not None and part["operator"] != "~"
    wanted: Any = part["word"] or part["number"] or part["text"][1:-1]
    if is_number:
        wanted = float(wanted) * MILLISECONDS[part["unit"] or "ms"]

    def holds(values: Mapping[str, Any]) -> bool:
        value = values.get(name)
        if value is None or (is_number and not isinstance(value, int | float)):
            return compare is operator.ne
        return compare(value if is_number else str(value), wanted)

    return holds
