"""/invocations, the one path that SageMaker asks: its body says by its fields which endpoint is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.requests.gate import Gate
from shared.errors import RequestError

Endpoint = Callable[[Request], Awaitable[Response]]

GENERATES = (
    ("encoding_format", "/v1/embeddings"), ("messages", "/v1/chat/completions"), ("prompt", "/v1/completions"),
    ("input", "/v1/embeddings"),
)  # fmt: skip
SCORES = (
    ("query", "/v1/rerank"), ("text_1", "/v1/score"), ("queries", "/v1/score"), ("data_1", "/v1/score"),
    ("messages", "/v1/classify"), ("input", "/v1/classify"),
)  # fmt: skip


class Invocations:
    def __init__(self, gate: Gate, endpoints: dict[str, Endpoint]) -> None:
        """`endpoints`: by path."""
        self._gate = gate
        self._endpoints = endpoints

    async def post(self, request: Request) -> Response:
        """A model that classifies has other endpoints than one that generates."""
        fields = await self._gate.bodies.fields(request)
        rows = SCORES if self._gate.labels else GENERATES
        path = next((path for field, path in rows if field in fields), None)
        if path is None:
            names = ", ".join(dict.fromkeys(field for field, _ in rows))
            raise RequestError(f"the body must have one of the fields that select an endpoint: {names}")
        return await self._endpoints[path](request)
