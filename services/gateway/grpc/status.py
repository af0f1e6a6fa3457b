"""From the reasons for refusing a request to gRPC's statuses, and the metadata that says when to try again."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from services.gateway.bus.refusals import DEFAULT_RETRY_AFTER_MS, details
from shared.errors import RejectCode, RequestError

STATUS = {code: grpc.StatusCode[code.name] for code in RejectCode}


async def abort(context: Any, error: RequestError) -> NoReturn:
    """End the call with the error's status."""
    try:
        await context.abort(STATUS[error.code], details(error), trailing_metadata(error))
    except grpc.aio.InternalError:  # the call is over already: its deadline passed on the client's side too
        raise grpc.aio.AbortError("the client has ended the call") from None
    raise AssertionError("context.abort returned")


def trailing_metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    """`error-field`, `error-reason` and `retry-after-ms`, where they say something."""
    wait = error.retry_after_ms or DEFAULT_RETRY_AFTER_MS.get(error.code, 0)
    values = {"error-field": error.field, "error-reason": error.reason, "retry-after-ms": str(wait or "")}
    return tuple((name, value) for name, value in values.items() if value)
