"""From the troupe's reasons for refusing to gRPC's statuses, and what tells a client when to try again."""

from __future__ import annotations

import grpc

from shared.errors import RejectCode, RequestError
from shared.messages import RequestRejected

STATUS = {
    RejectCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    RejectCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    RejectCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    RejectCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    RejectCode.CANCELLED: grpc.StatusCode.CANCELLED,
    RejectCode.INTERNAL: grpc.StatusCode.INTERNAL,
    RejectCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    RejectCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
}

# A client that is told to come back without a time would come back at once.
DEFAULT_RETRY_AFTER_MS = {RejectCode.RESOURCE_EXHAUSTED: 1000, RejectCode.UNAVAILABLE: 500}

MAX_DETAIL_CHARS = 2048  # details travel as a header, and clients bound the size of those


def rejected(message: RequestRejected) -> RequestError:
    """The error that another service's refusal stands for."""
    return RequestError(
        message.message,
        field=message.field,
        code=message.code,
        retry_after_ms=message.retry_after_ms,
        reason=message.reason,
    )


def unavailable(reason: str) -> RequestError:
    return RequestError(reason, code=RejectCode.UNAVAILABLE)


def details(error: RequestError) -> str:
    """The status's text: it begins with the field's name where there is one."""
    text = str(error) or error.code.value
    if error.field and not text.startswith(error.field):
        text = f"{error.field}: {text}"
    return text if len(text) <= MAX_DETAIL_CHARS else text[: MAX_DETAIL_CHARS - 1] + "…"


def trailing_metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    """`error-field`, `error-reason` and `retry-after-ms`, where they say something."""
    metadata: list[tuple[str, str]] = []
    if error.field:
        metadata.append(("error-field", error.field))
    if error.reason:
        metadata.append(("error-reason", error.reason))
    if wait := error.retry_after_ms or DEFAULT_RETRY_AFTER_MS.get(error.code, 0):
        metadata.append(("retry-after-ms", str(wait)))
    return tuple(metadata)
