"""Refusals as errors: another service's, and the gateway's own where a service is missing; and their texts."""

from __future__ import annotations

from shared.errors import RejectCode, RequestError
from shared.messages import RequestRejected

# A client that gets no time to come back would come back at once.
DEFAULT_RETRY_AFTER_MS = {RejectCode.RESOURCE_EXHAUSTED: 1000, RejectCode.UNAVAILABLE: 500}

# Details travel as a header, in which a byte that is no printable ASCII takes three; clients refuse more than 8 KB.
MAX_DETAIL_BYTES = 2048
CUT = "…"


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


UNSENDABLE = (UnicodeEncodeError, OverflowError)  # what encoding a message raises: half surrogates, large numbers


def unsendable(error: Exception) -> RequestError:
    """A client's text or number passes no message."""
    return RequestError(f"the request cannot be passed on: {error}")


def details(error: RequestError) -> str:
    """The status's text: it begins with the field's name where there is one."""
    text = str(error) or error.code.value
    if error.field and not text.startswith(error.field):
        text = f"{error.field}: {text}"
    written = text.encode("utf-8", "replace")
    if len(written) <= MAX_DETAIL_BYTES:
        return text
    return written[: MAX_DETAIL_BYTES - len(CUT.encode())].decode("utf-8", "ignore") + CUT
