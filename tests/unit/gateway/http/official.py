"""The official clients, unmodified, against a gateway whose model is scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import pytest

from shared.messages import TokenizeRequest
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.troupe import LAST

T = TypeVar("T")
PARSERS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@contextlib.asynccontextmanager
async def openai_client(**overrides: Any) -> AsyncIterator[tuple[Http, Any]]:
    import openai  # a second: not for every worker of pytest

    async with (
        http(**(PARSERS | overrides)) as h,
        openai.AsyncOpenAI(base_url=f"{_url(h)}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield h, client


@contextlib.asynccontextmanager
async def anthropic_client(**overrides: Any) -> AsyncIterator[tuple[Http, Any]]:
    anthropic: Any = pytest.importorskip("anthropic", reason="needs the anthropic package")
    async with (
        http(**(PARSERS | overrides)) as h,
        anthropic.AsyncAnthropic(base_url=_url(h), api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield h, client


def _url(h: Http) -> str:
    return str(h.client.base_url).rstrip("/")


async def answered(h: Http, work: Awaitable[T], *pieces: str, **end: Any) -> tuple[TokenizeRequest, T]:
    """What was asked, and what `work` makes of an answer that comes in `pieces`."""
    asked = asyncio.ensure_future(work)
    request = await h.troupe.request()
    at = (0, 0)
    for place, piece in enumerate(pieces):
        more = (LAST | end) if place == len(pieces) - 1 else {}
        h.troupe.say(request, piece, at=at, token_ids=[7], **more)
        at = (at[0] + 1, at[1] + len(piece))
    return request, await asked
