"""Structured logs: events with fields, one JSON object a line, or coloured text on a terminal.

Every line carries the service and instance; lines about a request carry request_id and trace_id
(`request_logger`).  Prompt and output text are never logged.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from typing import Any

import msgspec
import structlog

from shared.messages.control import ServiceName
from shared.messages.requests import RequestHeader

_encoder = msgspec.json.Encoder(enc_hook=repr)
_recent: deque[dict[str, Any]] = deque(maxlen=256)


def recent_events() -> list[dict[str, Any]]:
    """This process's last log lines, oldest first."""
    return list(_recent)


def setup_logging(service: ServiceName | str, instance: str, *, level: str = "info", format: str = "auto") -> None:
    """Configure structlog once per process; lines go to standard error, flushed one by one."""
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        renderer = structlog.processors.JSONRenderer(_json)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _remember,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=str(service), instance=instance)


def _remember(_: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Without traces, whose last lines may quote what a library failed at."""
    _recent.append({key: value for key, value in event.items() if key != "exc_info"})
    return event


def _json(event: structlog.typing.EventDict, **_: object) -> str:
    """A third of the time of the standard library's."""
    return _encoder.encode(event).decode()


def request_logger(
    logger: structlog.typing.FilteringBoundLogger, header: RequestHeader
) -> structlog.typing.FilteringBoundLogger:
    """The logger for lines about one request."""
    return logger.bind(request_id=header.request_id, trace_id=header.trace_id)
