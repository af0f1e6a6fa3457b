"""A running gateway with its HTTP server, a client of it, and the troupe's other side scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from shared.messages import DecodeRequest, DecodeResult, EncodeRequest, EncodeResult, PiecesRequest, PiecesResult
from shared.packing import pack_tokens, unpack_tokens
from tests.unit.gateway.troupe import FakeTroupe, front

JSON = {"content-type": "application/json"}


class Http:
    """A client, and the troupe that it speaks to through the gateway."""

    def __init__(self, troupe: FakeTroupe, client: httpx2.AsyncClient) -> None:
        self.troupe = troupe
        self.client = client

    def post(self, path: str, body: Any, **headers: str) -> asyncio.Task[httpx2.Response]:
        """Ask; the answer comes when the test has played the troupe's part."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.create_task(self.client.post(path, content=content, headers=JSON | headers))

    async def refusal(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """The status and the error of a request that does not reach the troupe."""
        response = await self.post(path, body, **headers)
        return response.status_code, response.json()["error"]

    async def answer_pieces(self) -> list[int]:
        """Answer one question about single tokens: token 7 is called t7, 255 is half a character."""
        _, question = await self.troupe.asked(PiecesRequest)
        ids = unpack_tokens(question.token_ids)
        self.troupe.tell(PiecesResult(question.request_id, [b"\xf0\x9f" if i == 255 else b"t%d" % i for i in ids]))
        return ids

    async def answer_encode(self, ids: list[int]) -> EncodeRequest:
        _, question = await self.troupe.asked(EncodeRequest)
        self.troupe.tell(EncodeResult(question.request_id, pack_tokens(ids)))
        return question

    async def answer_decode(self, text: str) -> DecodeRequest:
        _, question = await self.troupe.asked(DecodeRequest)
        self.troupe.tell(DecodeResult(question.request_id, text))
        return question


@contextlib.asynccontextmanager
async def http(**overrides: Any) -> AsyncIterator[Http]:
    overrides = {"response_ttl": 0} | overrides  # nothing is written where a test does not say where
    async with front(http_port=0, **overrides) as running:
        server = running.troupe.gateway.http
        assert server is not None
        url = f"http://127.0.0.1:{server.port}"
        async with httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
            yield Http(running.troupe, client)


def events(text: str) -> list[Any]:
    """The data of server-sent events; the last of them must say that it is."""
    found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


def streaming(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True}
