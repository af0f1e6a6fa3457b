"""/openapi.json: the API in OpenAPI's words, made from the structs that read bodies and make answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.objects import encode
from services.gateway.http.errors.failures import MESSAGES, ErrorBody, MessagesErrorBody
from services.gateway.http.openapi_operations import EVENTS, JSON, OCTETS, OPERATIONS, Operation
from shared.version import VERSION

OPENAPI = "3.1.0"  # whose schemas are those of JSON Schema 2020-12, which msgspec writes
REFERENCES = "#/components/schemas/{name}"
PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
# Any of them: a deployment without keys asks for none.
SECURITY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"key": []}]
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def description(prefix: str) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint.  `prefix`: the path beneath which a proxy shows the server, without a slash at its end; empty:
    none."""
    document = cache(lambda: encode(describe(OPERATIONS, prefix)))

    async def get(request: Request) -> Response:
        return Response(document(), media_type=JSON)

    return get


def describe(operations: Mapping[tuple[str, str], Operation], prefix: str = "") -> dict[str, Any]:
    """An OpenAPI document of operations by method and route."""
    kinds = list(dict.fromkeys(_kinds(operations.values())))
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCES)
    schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, route), operation in operations.items():
        paths.setdefault(PARAMETER.sub(r"{\1}", route), {})[method.lower()] = _described(route, operation, schemas)
    return {
        "openapi": OPENAPI,
        "info": {"title": "Pageant", "version": VERSION},
        "servers": [{"url": prefix or "/"}],
        "security": SECURITY,
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SCHEMES},
    }


def _kinds(operations: Iterable[Operation]) -> Iterator[Any]:
    """The structs of all operations."""
    for operation in operations:
        for given in (operation.body, operation.answer, operation.streams):
            for one in given if isinstance(given, tuple) else (given,):
                if one is not None and not isinstance(one, dict):
                    yield one
    yield from (ErrorBody, MessagesErrorBody)


def _described(route: str, operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    error = schemas[MessagesErrorBody if route.startswith(MESSAGES) else ErrorBody]
    answer = {"description": "The answer", "content": _content(operation, schemas)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            **{str(status): answer for status in (200, *operation.statuses)},
            "default": {"description": "An error", "content": {JSON: {"schema": error}}},
        },
    }
    if operation.body is not None:
        content = {operation.reads: {"schema": _schema(operation.body, schemas)}}
        described["requestBody"] = {"required": True, "content": content}
    if parameters := list(_parameters(route, operation)):
        described["parameters"] = parameters
    return described


def _content(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    """By content type; of a stream the schema is that of the `data` of an event."""
    content: dict[str, Any] = {kind: {"schema": _text(kind)} for kind in operation.others}
    if operation.answer is not None:
        content[JSON] = {"schema": _schema(operation.answer, schemas)}
    if operation.streams is not None:
        data = {"contentMediaType": JSON, "contentSchema": _schema(operation.streams, schemas)}
        content[EVENTS] = {"schema": {"type": "string", **data}}
    return content


def _text(kind: str) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": kind} if kind == OCTETS else {"type": "string"}


def _schema(given: Any, schemas: Mapping[Any, Any]) -> Any:
    if isinstance(given, tuple):
        return {"anyOf": [_schema(one, schemas) for one in given]}
    return given if isinstance(given, dict) else schemas[given]


def _parameters(route: str, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in PARAMETER.findall(route):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, kind in (operation.query or {}).items():
        yield {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
