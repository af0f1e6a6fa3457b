"""/: one page to try the server with, and to look after it.  It loads nothing from elsewhere, and talks to this server.

Its parts lie in `browser/`: a document, style sheets and modules of JavaScript, which a browser reads as they are.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PARTS = Path(__file__).with_name("browser")
DOCUMENT = "index.html"
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # an upgraded server has another page
}


async def page(request: Request) -> Response:
    return _answer(request, DOCUMENT)


async def part(request: Request) -> Response:
    """A style sheet or a module, by its path below `browser/`."""
    name: str = request.path_params["name"]
    if name not in _parts():
        raise HTTPException(404)
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    text, tag = _parts()[name]
    headers = HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(text, headers=headers, media_type=f"{KINDS[Path(name).suffix]}; charset=utf-8")


@cache
def _parts() -> dict[str, tuple[bytes, str]]:
    """Contents and tag by path: no other file is ever read for a client."""
    found = {path.relative_to(PARTS).as_posix(): path.read_bytes() for path in PARTS.rglob("*") if path.is_file()}
    return {name: (text, f'"{hashlib.sha256(text).hexdigest()[:32]}"') for name, text in found.items()}
