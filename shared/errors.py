"""The exception tree.

    PageantError
    ├── RequestError      ends one request with a status; names the field and the limit
    ├── ProtocolError     a message that cannot be used: dropped, its request quarantined
    ├── ModelError        a checkpoint that cannot be served: says which file, tensor or key
    ├── ConfigError       a setting that cannot work: says which one and what would
    └── FatalError        a broken invariant or device: the process exits non-zero after saying why

Everything a client can cause is a RequestError; nothing a client sends may raise anything else.
"""

from __future__ import annotations

from enum import StrEnum


class PageantError(Exception):
    """The root of everything this project raises on purpose."""


class RejectCode(StrEnum):
    """Why a request ended without an answer; the gateway maps each to one gRPC status."""

    INVALID_ARGUMENT = "invalid_argument"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNAVAILABLE = "unavailable"
    NOT_FOUND = "not_found"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # the reason of a prompt of more tokens than fit: OpenAI's word


class RequestError(PageantError):
    """One request cannot be served; `field` is the offending request field, or empty."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        code: RejectCode = RejectCode.INVALID_ARGUMENT,
        retry_after_ms: int = 0,
        reason: str = "",
    ) -> None:
        """`reason`: a word for programs, where `code` and `field` do not say enough."""
        super().__init__(message)
        self.field = field
        self.code = code
        self.retry_after_ms = retry_after_ms
        self.reason = reason


class ProtocolError(PageantError):
    """A peer sent a message that cannot be decoded or is malformed; only that message is dropped."""


class ModelError(PageantError):
    """A checkpoint directory that cannot be served."""


class ConfigError(PageantError):
    """A configuration value that cannot work."""


class FatalError(PageantError):
    """This process can no longer be trusted and must exit."""
