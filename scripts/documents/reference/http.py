"""http.md: the routes of the gateway's HTTP server, and the fields of the bodies that they read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import getmodule, getsource
from typing import Any, get_type_hints
from unittest.mock import MagicMock

import msgspec
from starlette.routing import Route

from scripts.documents.reference.markdown import code, page, section, table
from scripts.documents.reference.protos import declarations
from scripts.documents.reference.source import classes, first_paragraph, remarks, type_text
from services.gateway.http.app import make_app
from services.gateway.http.requests.fields import WithoutEffect, refused_fields
from shared.config import Settings

TEXT = """\
Bodies are JSON. A field that is absent or null has the server's default. [The guide](../http.md)
says how to use the routes, and what a field does where its name does not say it."""
HEAD = ("field", "type", "meaning")
BODY = re.compile(r"\.read\(request, (\w+)\)")
EFFECT = "without effect"
REFUSED = "not possible here"


def render() -> str:
    described = list(routes())
    overview = table(
        ("method", "path", "body"), ((method, code(path), _link(kind)) for method, path, kind in described)
    )
    kinds = dict.fromkeys(kind for _, _, kind in described if kind)
    parts = dict.fromkeys(part for kind in kinds for part in _parts(kind))
    return page(
        "HTTP",
        "services/gateway/http",
        TEXT,
        section("Routes", overview),
        *(_section(kind) for kind in kinds),
        *(_section(part) for part in parts if part not in kinds),
    )


def routes() -> Iterator[tuple[str, str, type[Any] | None]]:
    """Of the application itself; a body is what its endpoint reads."""
    gate = MagicMock(settings=Settings())
    for route in make_app(gate, MagicMock(), list).routes:
        assert isinstance(route, Route)
        found = BODY.search(getsource(route.endpoint))
        module = getmodule(route.endpoint)
        kind = getattr(sys.modules[module.__name__], found[1]) if found and module else None
        yield ", ".join(sorted((route.methods or set()) - {"HEAD"})), route.path, kind


def _link(kind: type[Any] | None) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})" if kind else ""


def _parts(kind: type[Any], above: tuple[type[Any], ...] = ()) -> Iterator[type[Any]]:
    """What a body takes fields from, and the structs within it; one may be within itself."""
    yield from _bases(kind)
    for hint in get_type_hints(kind).values():
        for inner in classes(hint):
            yield inner
            if inner not in (*above, kind):
                yield from _parts(inner, (*above, kind))


def _bases(kind: type[Any]) -> list[type[Any]]:
    return [base for base in kind.__mro__[1:] if base is not msgspec.Struct and issubclass(base, msgspec.Struct)]


def _section(kind: type[Any]) -> str:
    """The fields that it declares itself."""
    hints = get_type_hints(kind, include_extras=True)
    rows: dict[str, list[tuple[str, str, str]]] = {"": [], EFFECT: [], REFUSED: []}
    for field in msgspec.structs.fields(kind):
        if field.name in vars(kind).get("__annotations__", {}):
            group, text = _meaning(kind, field.name)
            kind_text = type_text(hints[field.name]).removesuffix(" | None")
            text = "; ".join(part for part in ("required" if field.required else "", text) if part)
            rows[group].append((code(field.encode_name), kind_text, text))
    refused = [(name, text) for name, _, text in rows[REFUSED]]
    ignored = ", ".join(name for name, _, _ in rows[EFFECT])
    bases = " and ".join(_link(base) for base in _bases(kind))
    return section(
        kind.__name__,
        first_paragraph(kind),
        table(HEAD, rows[""]) if rows[""] else "",
        f"Accepted, without effect: {ignored}." if ignored else "",
        table(("refused with status 400", "not supported"), refused) if refused else "",
        f"It has the fields of {bases} too." if bases else "",
    )


def _meaning(kind: type[msgspec.Struct], name: str) -> tuple[str, str]:
    """Its group, and what it means: by the comment in its class, or in the .proto file under the same name."""
    remark = remarks(kind)[name]
    if kind is WithoutEffect or remark.own.startswith(EFFECT):
        return EFFECT, ""
    if what := refused_fields(kind).get(name):
        return REFUSED, what
    return "", remark.own or _of_protos().get(name, "")


def _of_protos() -> dict[str, str]:
    """Fields of sampling and of a request, which have the same names over HTTP."""
    wanted = ("SamplingParams", "GenerateRequest", "BeamSearch", "EmbedRequest")
    found = [one for one in declarations() if one.name in wanted]
    return {entry.name: entry.text for one in found for entry in one.entries}
