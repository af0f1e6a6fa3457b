"""Reading a request: its body within bounds and as the type it should be, and what its headers say of the caller."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request

from services.gateway.http.errors.failures import PayloadTooLargeError, UnsupportedMediaTypeError
from shared.errors import RejectCode, RequestError

log = structlog.get_logger()

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout"  # seconds from now until the client gives up
MAX_TIMEOUT = 1e7
CONTENT_TYPE, JSON = "content-type", "application/json"
MAX_DIGITS = 16  # of a number in a query: Python raises for thousands of them
PLACE = re.compile(r" - at `(?:key` in `)?\$([^`]*)`$")
OF_A_MAPPING = re.compile(r"\[\.\.\.\].*")  # msgspec does not say of which key
FLOAT_FOR_INTEGER = "got `float`"
MAX_UNKNOWN = 64  # names of unknown fields that are logged, each once


def check_content_type(request: Request) -> None:
    """Raise UnsupportedMediaTypeError unless the body is said to be JSON, once.

    A browser asks a server first (a preflight) before a page of another origin may send `application/json`.  It does
    not where a form could have sent the same: text/plain, a form's own types, and no type at all.
    """
    given = request.headers.getlist(CONTENT_TYPE)
    if len(given) == 1 and given[0].partition(";")[0].strip().lower() == JSON:
        return
    found = f"got {', '.join(given)[:64]!r}" if given else "got none"
    raise UnsupportedMediaTypeError(
        f"the body must be JSON and say so: send the header `{CONTENT_TYPE}: {JSON}` ({found}); "
        f"with curl: -H '{CONTENT_TYPE}: {JSON}'",
        field=CONTENT_TYPE,
    )


class Bodies:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unknown: set[str] = set()

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body as a `kind`.  Raises RequestError naming the field that is not what it should be."""
        check_content_type(request)
        data = await self._bytes(request)
        request.state.arrival = time.time()
        try:
            body = _decoded(data, kind)
        except msgspec.ValidationError as error:
            raise not_valid(error) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        self._notice_unknown(data, kind)
        request.state.body = body
        return body

    async def fields(self, request: Request) -> frozenset[str]:
        """The names of the body's fields.  It can be read afterwards, as what it turns out to be."""
        check_content_type(request)
        request.state.data = await self._bytes(request)
        try:
            return _keys(request.state.data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None

    async def _bytes(self, request: Request) -> bytearray:
        read: bytearray | None = getattr(request.state, "data", None)
        if read is not None:
            return read
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large(int(declared))
        data = bytearray()  # one piece from the start: a list of pieces would be there twice at the end
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > self._max_bytes:
                    raise self._too_large(len(data))
        except ClientDisconnect:
            raise RequestError("the client went away", code=RejectCode.CANCELLED) from None
        return data

    def _too_large(self, size: int) -> RequestError:
        return PayloadTooLargeError(
            f"the body has {size} bytes or more, of at most max_request_bytes={self._max_bytes}"
        )

    def _notice_unknown(self, data: bytearray, kind: type[Any]) -> None:
        """New fields appear in clients every month, so they are not refused; but nor are they ignored in silence."""
        if len(self._unknown) >= MAX_UNKNOWN:
            return
        known = _names(cast(Hashable, kind))
        for name in _keys(data) - known - self._unknown:
            self._unknown.add(name)
            log.warning("unknown_field_ignored", body=kind.__name__, field=name[:64])


def _decoded(data: bytearray, kind: type[T]) -> T:
    """JSON knows no integers: 2.0 is 2, to clients whose language writes it so.  Raises msgspec's errors."""
    try:
        body: T = _decoder(cast(Hashable, kind)).decode(data)
    except msgspec.ValidationError as error:
        if FLOAT_FOR_INTEGER not in str(error):
            raise
        body = msgspec.convert(_with_integers(msgspec.json.decode(data)), kind)
    return body


def _with_integers(value: Any) -> Any:
    """The same with whole numbers as integers."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _with_integers(inner) for key, inner in value.items()}
        case list():
            return [_with_integers(inner) for inner in value]
    return value


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, kind))


@cache
def _names(kind: Hashable) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(cast(Any, kind)))


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _keys(data: bytearray) -> frozenset[str]:
    return frozenset(_members.decode(data))


def field_error(field: str, what: str) -> RequestError:
    """A text that begins with the name of the field that something is wrong with."""
    return RequestError(f"{field} {what}", field=field)


def read_number(text: str, field: str, least: int, most: int) -> int:
    """A number of a query or a form.  Raises RequestError where it is none, or beyond the limits."""
    if not (text.isdecimal() and text.isascii() and len(text) <= MAX_DIGITS and least <= int(text) <= most):
        raise field_error(field, f"must be in {least}..{most}, got {text[:32]!r}")
    return int(text)


def not_valid(error: msgspec.ValidationError, root: str = "") -> RequestError:
    """msgspec says where; OpenAI's `param` names that place, within `root` of the body."""
    message = str(error)
    found = PLACE.search(message)
    field = root + (found[1] if found else "")
    if missing := re.search(r"missing required field `([^`]+)`", message):
        field += f".{missing[1]}"
    field = OF_A_MAPPING.sub("", field).removeprefix(".")
    message = PLACE.sub("", message).replace("Object missing", "missing")
    return RequestError(f"{field}: {message}" if field else message, field=field)


def converted(value: Any, kind: type[T], field: str) -> T:
    """What a body has at `field` as a `kind`.  Raises RequestError naming what is not as it should be."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise not_valid(error, field) from None


def arrival(request: Request) -> float:
    """Unix seconds at which all of it was here: its sender's slowness is none of ours, and all that follows is."""
    found: float = request.state.arrival
    return found


def seconds_left(request: Request) -> float | None:
    """How long the client waits, where it says so."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        raise field_error(TIMEOUT_HEADER, f"must be a number of seconds, got {text[:32]!r}")
    return seconds
