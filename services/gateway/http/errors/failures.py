"""From the services' reasons for refusing to HTTP's statuses, in OpenAI's shape of an error or in Anthropic's."""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from services.gateway.access.intake import BodyTimeoutError
from services.gateway.bus.refusals import DEFAULT_RETRY_AFTER_MS
from services.gateway.http.errors.naming import as_sent
from shared.errors import CONTEXT_LENGTH_EXCEEDED, RejectCode, RequestError

log = structlog.get_logger()

ABORT = "pageant.abort"  # an extension of requests' scopes: ends the connection at once
CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; there is no official one

STATUS = {
    RejectCode.INVALID_ARGUMENT: 400,
    RejectCode.UNAUTHENTICATED: 401,
    RejectCode.PERMISSION_DENIED: 403,
    RejectCode.NOT_FOUND: 404,
    RejectCode.RESOURCE_EXHAUSTED: 429,
    RejectCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    RejectCode.INTERNAL: 500,
    RejectCode.UNAVAILABLE: 503,
    RejectCode.DEADLINE_EXCEEDED: 504,
}

TYPES = {  # other statuses below 500 are invalid requests, those above errors of the server
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    CLIENT_CLOSED_REQUEST: "cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}


MESSAGES = "/v1/messages"  # the paths whose clients read Anthropic's errors
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class PayloadTooLargeError(RequestError):
    """A body of more bytes than the server reads."""


class UnsupportedMediaTypeError(RequestError):
    """A body that does not say that it is JSON."""


OWN_STATUS: dict[type[RequestError], int] = {
    BodyTimeoutError: 408,
    PayloadTooLargeError: 413,
    UnsupportedMediaTypeError: 415,
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    """Anthropic's; `param` is ours."""

    type: str
    message: str
    param: str | None


class MessagesErrorBody(msgspec.Struct):
    error: MessagesErrorDetail
    type: str = "error"


def status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"


def status_of(error: RequestError) -> int:
    return OWN_STATUS.get(type(error)) or STATUS[error.code]


def error_body(error: RequestError, scope: Scope, status: int = 0) -> bytes:
    """JSON as the path's clients read it; `param` is the request's own name of the field.

    `scope`: of the request, empty where none has been read.  `status`: where it is not the error's own.
    """
    status = status or status_of(error)
    field, message = as_sent(error, scope)
    code = "model_not_found" if (status, error.field) == (404, "model") else error.reason or error.code.value
    return _encode(status, message or error.code.value, field or None, code, scope)


async def failure(request: Request, error: Exception) -> Response:
    """A request that was refused or has failed."""
    assert isinstance(error, RequestError)
    return refusal(error, request.scope)


def refusal(error: RequestError, scope: Scope) -> Response:
    """The response that says so, and when to come again."""
    headers = {"www-authenticate": "Bearer"} if error.code is RejectCode.UNAUTHENTICATED else {}
    if wait := error.retry_after_ms or DEFAULT_RETRY_AFTER_MS.get(error.code, 0):
        headers |= {"retry-after": str(math.ceil(wait / 1000)), "retry-after-ms": str(wait)}
    return Response(error_body(error, scope), status_of(error), headers, "application/json")


async def no_such_route(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, a method that the path does not have."""
    assert isinstance(error, HTTPException)
    body = _encode(error.status_code, f"{request.method} {request.url.path}: {error.detail}", None, None, request.scope)
    return Response(body, error.status_code, error.headers, "application/json")


async def defect(request: Request, error: Exception) -> Response:
    """A defect of the server: the client learns that the request is not at fault, and nothing more."""
    log.error("request_failed_unexpectedly", path=request.url.path, exc_info=error)
    body = _encode(500, "the server has failed at this request", None, "internal", request.scope)
    return Response(body, 500, None, "application/json")


def _encode(status: int, message: str, param: str | None, code: str | None, scope: Scope) -> bytes:
    if str(scope.get("path", "")).startswith(MESSAGES):
        if code == CONTEXT_LENGTH_EXCEEDED:  # by Anthropic's words a client knows that it has to shorten its history
            message = f"prompt is too long: {message}"
        kind = MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(MessagesErrorBody(MessagesErrorDetail(kind, message, param)))
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code)))


def abort(scope: Scope) -> None:
    """End a request's connection without waiting for its client to read; nothing where it has none of its own."""
    if (extension := scope.get("extensions", {}).get(ABORT)) is not None:
        extension["call"]()
