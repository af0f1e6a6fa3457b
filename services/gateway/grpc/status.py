"""From the reasons for refusing a request to gRPC's statuses, and what tells a client when to try again."""

from __future__ import annotations

import grpc

from services.gateway.bus.refusals import DEFAULT_RETRY_AFTER_MS, details
from shared.errors import RejectCode, RequestError

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


def abort_args(error: RequestError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """What `context.abort` takes to end a call with this error."""
    return STATUS[error.code], details(error), trailing_metadata(error)


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
