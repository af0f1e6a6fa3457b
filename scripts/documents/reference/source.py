"""What the source of a class says of its fields: the comment behind each, and the comment above a group of them."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args

import msgspec


@dataclass(frozen=True)
class Remark:
    """Comments about one field, empty where there are none."""

    own: str = ""  # behind it
    group: str = ""  # on a line of its own, above it or above the fields before it


def remarks(kind: type[Any]) -> dict[str, Remark]:
    """Of the fields that this class itself declares."""
    text = textwrap.dedent(inspect.getsource(kind))
    (declared,) = ast.parse(text).body
    assert isinstance(declared, ast.ClassDef)
    behind, alone = _comments(text)
    found: dict[str, Remark] = {}
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            own = " ".join(behind[line] for line in lines if line in behind)
            above = [line for line in alone if line < node.lineno]
            found[node.target.id] = Remark(own, alone[max(above)] if above else "")
    return found


def _comments(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Comments by line: those behind code, and those alone; of the latter a block is one, at its last line."""
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words = token.start[0], token.string.lstrip("# ")
        if token.line[: token.start[1]].strip():
            behind[line] = words
        else:
            alone[line] = f"{alone.pop(line - 1, '')} {words}".strip()
    return behind, alone


def first_paragraph(kind: Any) -> str:
    """Of a docstring, in one line; empty where there is none of its own."""
    text = inspect.cleandoc(kind.__doc__ or "") if "__doc__" in vars(kind) else ""
    return " ".join(text.split("\n\n")[0].split())


def whole_docstring(kind: Any) -> str:
    """A docstring with its paragraphs, each in one line."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def type_text(hint: Any) -> str:
    """A type as the source has it, without modules and without bounds."""
    origin = getattr(hint, "__origin__", None)
    if hasattr(hint, "__metadata__"):
        return type_text(origin)
    arguments = getattr(hint, "__args__", ())
    if hint is type(None) or hint is None:
        return "None"
    if "Union" in type(hint).__name__ or str(origin) == "typing.Union":
        return " | ".join(type_text(argument) for argument in arguments)
    if str(origin) == "typing.Literal":
        return ", ".join(str(argument) for argument in arguments)
    name = str(getattr(hint, "__name__", hint)).removeprefix("typing.")
    if arguments:
        inner = ", ".join("..." if argument is ... else type_text(argument) for argument in arguments)
        return f"{getattr(origin, '__name__', name)}[{inner}]"
    return name


def classes(hint: Any) -> Iterator[type[Any]]:
    """Structs and enumerations within a type."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct | StrEnum):
        yield hint
    for argument in get_args(hint):
        yield from classes(argument)
