"""messages.md: every message between services, with its sender, its receivers and its fields."""

from __future__ import annotations

import ast
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from scripts.documents.reference.markdown import code, page, section, table
from scripts.documents.reference.source import classes, remarks, type_text, whole_docstring
from shared.messages import Message, ServiceName
from shared.messages.inboxes import INBOXES, TO_ONESELF

ROOT = Path(__file__).resolve().parents[3]
INBOX_OF = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker", "draft", "store")  # in the order of INBOXES
TEXT = """\
Services exchange typed messages over sockets. A message is a msgspec struct, encoded as a msgpack array whose first
element is its name; fields are only ever appended, with defaults. An inbox decodes the messages of one union and
nothing else (`shared/messages/inboxes.py`). The sender of a message is the service whose code constructs it."""
BY_COUNT = {6: ["every service"], 5: ["every service but the scheduler"]}
HEAD = ("field", "type", "default", "meaning")


def render() -> str:
    receivers = _receivers()
    sent = _senders({kind.__name__ for kind in receivers})
    overview = table(
        ("message", "from", "to"),
        (
            (f"[{kind.__name__}](#{kind.__name__.lower()})", _origin(kind, services, sent), ", ".join(services))
            for kind, services in receivers.items()
        ),
    )
    inner = [kind for kind in _nested(receivers) if kind not in receivers]
    return page(
        "Messages",
        "shared/messages",
        TEXT,
        section("Overview", overview),
        *(_section(kind) for kind in sorted(receivers, key=lambda kind: kind.__name__)),
        section("Parts of messages", "Structs that stand within messages."),
        *(_section(kind, level=3) for kind in sorted(inner, key=lambda kind: kind.__name__)),
    )


def _receivers() -> dict[type[Message], list[str]]:
    found: dict[type[Message], list[str]] = {}
    for service, union in zip(INBOX_OF, INBOXES, strict=True):
        for kind in get_args(union):
            found.setdefault(kind, []).append(service)
    return {kind: BY_COUNT.get(len(services), services) for kind, services in found.items()}


def _origin(kind: type[Message], services: list[str], sent: dict[str, set[str]]) -> str:
    if kind in TO_ONESELF:
        return "the process itself"
    senders = sent.get(kind.__name__, set())
    if "shared" in senders and services == ["scheduler"]:
        return "every service but the scheduler"
    return ", ".join(sorted(senders - {"shared"} - set(services if len(services) == 1 else ())))


def _senders(names: set[str]) -> dict[str, set[str]]:
    """Which services construct each message; `shared` where the actor that all services share does."""
    found: dict[str, set[str]] = {}
    folders = {service.value: ROOT / "services" / service.value for service in ServiceName}
    for service, folder in (folders | {"shared": ROOT / "shared" / "actor", "engine": ROOT / "engine"}).items():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                    found.setdefault(node.func.id, set()).add("worker" if service == "engine" else service)
    return found


def _nested(kinds: Any) -> list[type[Any]]:
    """Structs and enumerations that fields of these have, and theirs."""
    found: dict[type[Any], None] = {}
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        for hint in get_type_hints(kind).values() if issubclass(kind, msgspec.Struct) else ():
            for inner in classes(hint):
                if inner not in found:
                    found[inner] = None
                    todo.append(inner)
    return list(found)


def _section(kind: type[Any], level: int = 3) -> str:
    if issubclass(kind, StrEnum):
        members = ", ".join(code(member.value) for member in kind)
        return section(kind.__name__, f"An enumeration: {members}.", level=level)
    hints, said = get_type_hints(kind), remarks(kind)
    rows = [
        (code(field.name), type_text(hints[field.name]), default_text(field), said[field.name].own)
        for field in msgspec.structs.fields(kind)
    ]
    text = whole_docstring(kind) if "__doc__" in vars(kind) else ""
    return section(kind.__name__, text, table(HEAD, rows) if rows else "", level=level)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """`required` where there is none."""
    if isinstance(field.default, StrEnum):
        return code(field.default.value)
    if field.default is not msgspec.NODEFAULT:
        return code(repr(field.default))
    if field.default_factory is not msgspec.NODEFAULT:
        return code(repr(field.default_factory()))
    return "required"
