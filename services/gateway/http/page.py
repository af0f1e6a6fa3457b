"""/: one page to try the server with.  It loads nothing from anywhere and talks to this server only.

Its parts lie in `browser/` and leave as one document.  The policy names the digests of its script and style, so that
nothing else runs in it.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PARTS = Path(__file__).with_name("browser")
SCRIPTS = ("memory.js", "latency.js", "page.js")  # in this order
STYLES = ("page.css",)


async def page(request: Request) -> Response:
    document, policy = _document()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # an upgraded server has another page
    }
    return Response(document, headers=headers, media_type="text/html; charset=utf-8")


@cache
def _document() -> tuple[bytes, str]:
    """The page, and the policy under which a browser shows it."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    document = (PARTS / "index.html").read_text(encoding="utf-8")
    document = document.replace("<style></style>", f"<style>{style}</style>")
    document = document.replace("<script></script>", f"<script>{script}</script>")
    policy = {
        "default-src": "'none'",
        "script-src": _digest(script),
        "style-src": _digest(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return document.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "".join((PARTS / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
