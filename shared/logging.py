"""Structured logs: events with fields, one JSON object a line, or coloured text on a terminal.

Every line carries the service and instance; lines about a request carry request_id and trace_id
(`request_logger`).  Prompt and output text are never logged.
"""

from __future__ import annotations

import logging
import sys

import msgspec
import structlog

from shared.messages.control import ServiceName
from shared.messages.requests import RequestHeader

_encoder = msgspec.json.Encoder(enc_hook=repr)


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
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=str(service), instance=instance)


def _json(event: structlog.typing.EventDict, **_: object) -> str:
    """A third of the time of the standard library's."""
    return _encoder.encode(event).decode()


def request_logger(
    logger: structlog.typing.FilteringBoundLogger, header: RequestHeader
) -> structlog.typing.FilteringBoundLogger:
    """The logger for lines about one request."""
    return logger.bind(request_id=header.request_id, trace_id=header.trace_id)
