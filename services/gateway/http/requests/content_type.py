"""Bodies say that they are JSON: what a web page may post anywhere without being asked about it is not read.

A browser asks a server first (a preflight) before a page of another origin may send `application/json`.  It does not
where a form could have sent the same: text/plain, a form's own types, and no type at all.
"""

from __future__ import annotations

from starlette.requests import Request

from services.gateway.http.errors.failures import UnsupportedMediaTypeError

HEADER = "content-type"
JSON = "application/json"


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaTypeError unless the body is said to be JSON, once."""
    given = request.headers.getlist(HEADER)
    if len(given) == 1 and given[0].partition(";")[0].strip().lower() == JSON:
        return
    found = f"got {', '.join(given)[:64]!r}" if given else "got none"
    raise UnsupportedMediaTypeError(
        f"the body must be JSON and say so: send the header `{HEADER}: {JSON}` ({found}); "
        f"with curl: -H '{HEADER}: {JSON}'",
        field=HEADER,
    )
