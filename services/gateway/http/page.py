"""/: one page to try the server with.  It loads nothing from anywhere and talks to this server only."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


async def page(request: Request) -> Response:
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(_source(), headers=headers, media_type="text/html; charset=utf-8")


@cache
def _source() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()
