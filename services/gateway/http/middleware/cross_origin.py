"""Web pages of other origins: which may ask here, and read what is answered (the setting `cors_allow_origins`)."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from shared.config import AccessSettings
from shared.exposure import read_origins

# What a page may read of an answer beside its body: other headers are hidden from it.
SHOWN = ("x-request-id", "retry-after", "retry-after-ms", "www-authenticate")


def cross_origin(settings: AccessSettings) -> list[Middleware]:
    """Nothing where no origin is allowed: then browsers let no page of another origin read or post anything.

    Cookies are never allowed: a caller is known by the key that it shows.
    """
    origins = read_origins(settings.cors_allow_origins)
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=SHOWN,
        )
    ]
