"""grpc.md: services, calls, messages and fields of protos/pageant/v1, with their comments."""

from __future__ import annotations

import re
from itertools import takewhile

from scripts.documents.reference.markdown import code, page, section, table
from scripts.documents.reference.protos import Declaration, Entry, declarations

TEXT = """\
The package is `pageant.v1`; the files are in `protos/pageant/v1`. The gateway also serves `grpc.health.v1` and
reflection. Fields of one `oneof` have its name in the column "one of"."""
HEADS = {
    "service": ("call", "request -> response", "meaning"),
    "message": ("field", "type", "number", "one of", "meaning"),
    "enum": ("value", "number", "meaning"),
}
STATUS = re.compile(r"^ *([A-Z_]{6,}) {2,}(.*)$")


def render() -> str:
    found = list(declarations())
    names = {one.name for one in found}
    groups = {"Services": "service", "Messages": "message", "Enumerations": "enum"}
    parts = []
    for title, kind in groups.items():
        parts.append(f"## {title}\n")
        parts += [_section(one, names) for one in found if one.kind == kind]
    return page("gRPC", "protos/pageant/v1", TEXT, *parts)


def _section(one: Declaration, names: set[str]) -> str:
    columns = [_row(one.kind, entry, names) for entry in one.entries]
    return section(one.name, _text(one.text), table(HEADS[one.kind], columns) if columns else "", level=3)


def _row(kind: str, entry: Entry, names: set[str]) -> tuple[str, ...]:
    if kind == "service":
        return (code(entry.name), _linked(entry.type, names), entry.text)
    if kind == "enum":
        return (code(entry.name), entry.number, entry.text)
    return (code(entry.name), _linked(entry.type, names), entry.number, entry.choice, entry.text)


def _linked(text: str, names: set[str]) -> str:
    return re.sub(r"\w+", lambda word: f"[{word[0]}](#{word[0].lower()})" if word[0] in names else word[0], text)


def _text(text: str) -> str:
    """Paragraphs as they are; statuses, which stand in columns, as a table."""
    lines, parts = text.splitlines(), []
    while lines:
        statuses = [found for found in map(STATUS.match, takewhile(STATUS.match, lines)) if found]
        if statuses:
            parts.append(table(("status", "when"), ((found[1], found[2]) for found in statuses)).rstrip())
            lines = lines[len(statuses) :]
        else:
            words = list(takewhile(lambda line: not STATUS.match(line), lines))
            parts.append(" ".join(" ".join(words).split()))
            lines = lines[len(words) :]
    return "\n\n".join(part for part in parts if part)
