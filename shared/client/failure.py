"""A call that ended with a status, in Python's words."""

from __future__ import annotations

from typing import Any

import grpc

from shared.errors import PageantError


class CallError(PageantError):
    """A request that was refused, failed or was ended.

    `code` is gRPC's name of the status, `field` the offending field or empty, `retry_after` seconds or 0.
    """

    def __init__(self, code: str, message: str, *, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.field = field
        self.retry_after = retry_after


def call_error(error: grpc.aio.AioRpcError) -> CallError:
    """The error behind a call's exception."""
    return status_error(error.code().name, error.details(), error.trailing_metadata())


def status_error(code: str, details: str | None, trailing_metadata: Any) -> CallError:
    """The error behind a status and its trailing metadata."""
    metadata: dict[str, Any] = dict(trailing_metadata or ())
    return CallError(
        code,
        details or "",
        field=str(metadata.get("error-field", "")),
        retry_after=int(metadata.get("retry-after-ms", 0)) / 1000,
    )
