"""Reads the .proto files: declarations with the comments above and behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "protos" / "pageant" / "v1"
OPENS = re.compile(r"^(service|message|enum|oneof) (\w+) \{(\})?$")
FIELD = re.compile(r"^(?:(repeated|optional) )?([\w.]+|map<[^>]+>) (\w+) = (\d+);$")
VALUE = re.compile(r"^(\w+) = (\d+);$")
CALL = re.compile(r"^rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);$")


@dataclass
class Entry:
    """A field, a value of an enumeration, or a call of a service."""

    name: str
    type: str  # of a call: what it takes and gives
    number: str
    text: str
    choice: str = ""  # the oneof that it stands in


@dataclass
class Declaration:
    """A service, message or enumeration."""

    kind: str
    name: str
    text: str
    entries: list[Entry] = field(default_factory=list)


def declarations() -> Iterator[Declaration]:
    for name in ("inference", "control", "load_report"):
        yield from read((FOLDER / f"{name}.proto").read_text(encoding="utf-8"))


def read(text: str) -> list[Declaration]:
    """Raises ValueError on a line that it does not understand, so that nothing is left out in silence."""
    found: list[Declaration] = []
    above: list[str] = []
    opened: list[str] = []  # names of what is open
    for line in text.splitlines():
        statement, _, behind = (part.strip() for part in line.strip().partition("//"))
        if not statement:
            above = [*above, behind] if line.strip() else []
            continue
        said, above = " ".join([*above, behind]).strip() if opened else "\n".join(above), []
        if opening := OPENS.match(statement):
            if opening[1] != "oneof":
                found.append(Declaration(opening[1], opening[2], said))
            if not opening[3]:
                opened.append(opening[2])
        elif statement == "}":
            opened.pop()
        elif not opened:
            if not statement.startswith(("syntax", "package", "import")):
                raise ValueError(f"what is {line!r}?")
        else:
            found[-1].entries.append(_entry(statement, said, opened[1] if len(opened) > 1 else ""))
    return found


def _entry(statement: str, text: str, choice: str) -> Entry:
    if call := CALL.match(statement):
        kind = f"{call[2] or ''}{call[3]} -> {call[4] or ''}{call[5]}"
        return Entry(call[1], kind, "", text)
    if one := FIELD.match(statement):
        return Entry(one[3], f"{one[1]} {one[2]}" if one[1] else one[2], one[4], text, choice)
    if value := VALUE.match(statement):
        return Entry(value[1], "", value[2], text)
    raise ValueError(f"what is {statement!r}?")
