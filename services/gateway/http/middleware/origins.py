"""Requests that a web page of another origin can send without asking first: forms, and those without a body."""

from __future__ import annotations

from starlette.requests import Request

from shared.config import AccessSettings
from shared.errors import RejectCode, RequestError
from shared.exposure import ANY, read_origins


def check_origin(request: Request, settings: AccessSettings) -> None:
    """Raise RequestError where a browser says that the request is a page's of another origin, and that is not allowed.

    Other programs send no such header.  JSON needs no such check: a browser asks before it sends that.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return
    allowed = read_origins(settings.cors_allow_origins)
    own = origin.partition("://")[2]  # empty where the browser hides the origin: "null"
    if (own and own == request.headers.get("host")) or ANY in allowed or origin in allowed:
        return
    raise RequestError(
        f"pages of {origin[:128]!r} may not do this here; the setting cors_allow_origins names those that may",
        code=RejectCode.PERMISSION_DENIED,
        field="origin",
    )
