"""Structured logs: events with fields, one JSON object a line, or coloured text on a terminal.

Every line carries the service and instance; lines about a request carry request_id and trace_id
(`request_logger`).  Prompt and output text are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from typing import Any

import msgspec
import structlog

from shared.messages.control import ServiceName
from shared.messages.requests import RequestHeader
from shared.processes.standard_streams import tell_missing_lines

_encoder = msgspec.json.Encoder(enc_hook=repr)
_recent: deque[dict[str, Any]] = deque(maxlen=256)


def recent_events() -> list[dict[str, Any]]:
    """This process's last log lines, oldest first."""
    return list(_recent)


def setup_logging(service: ServiceName | str, instance: str, *, level: str = "info", format: str = "auto") -> None:
    """Configure structlog once per process; lines go to standard error.

    In a service that is a bounded sink (`shared/processes/standard_streams.py`): a line never fails and is never waited
    for. With the level `auto` a terminal gets warnings alone: what is not shown there is remembered all the same.
    """
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        renderer = structlog.processors.JSONRenderer(_json)
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _remember,
        *([_only_warnings] if level == "auto" and console and sys.stderr.isatty() else []),
        structlog.processors.format_exc_info,
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.INFO if level == "auto" else getattr(logging, level.upper())
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=str(service), instance=instance)
    said = structlog.wrap_logger(
        structlog.ReturnLogger(), processors=processors, wrapper_class=structlog.BoundLogger
    ).bind(service=str(service), instance=instance)  # it logs in the sink's thread, which has no context
    tell_missing_lines(lambda count: f"{said.warning('log_lines_dropped', num_dropped=count)}\n".encode())


def _remember(_: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Without traces, whose last lines may quote what a library failed at."""
    _recent.append({key: value for key, value in event.items() if key != "exc_info"})
    return event


def _only_warnings(_: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if method in ("debug", "info"):
        raise structlog.DropEvent
    return event


def _json(event: structlog.typing.EventDict, **_: object) -> str:
    """A third of the time of the standard library's.  What it cannot encode (half a surrogate pair, a large integer)
    comes out as Python shows it: a line never fails."""
    try:
        return _encoder.encode(event).decode()
    except Exception:
        return json.dumps({str(key): _shown(value) for key, value in event.items()})


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def request_logger(
    logger: structlog.typing.FilteringBoundLogger, header: RequestHeader
) -> structlog.typing.FilteringBoundLogger:
    """The logger for lines about one request."""
    return logger.bind(request_id=header.request_id, trace_id=header.trace_id)
