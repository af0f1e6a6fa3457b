"""A process around one actor: event loop, signals, logs, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

import structlog
import uvloop

from shared.actor.actor import Actor
from shared.config import Settings, load_settings
from shared.errors import ConfigError, ModelError, PageantError
from shared.logging import setup_logging
from shared.transport import Transport, make_transport

log = structlog.get_logger()

EXIT_FATAL = 70  # EX_SOFTWARE: the supervisor starts a new instance
EXIT_CONFIG = 78  # EX_CONFIG: starting again would not help
HOPELESS = (ConfigError, ModelError)  # what EXIT_CONFIG says


def run_actor(make: Callable[[Transport, Settings], Actor], settings: Settings | None = None) -> int:
    """Run one service until it is told to stop; returns the process's exit status."""
    try:
        settings = settings or load_settings()
    except PageantError as error:
        print(f"pageant: {error}", file=sys.stderr)
        return EXIT_CONFIG
    status: int = uvloop.run(_main(make, settings))
    return status


async def _main(make: Callable[[Transport, Settings], Actor], settings: Settings) -> int:
    setup_logging("starting", "", level=settings.log_level, format=settings.log_format)
    transport: Transport | None = None
    status = 0
    try:
        transport = make_transport(settings)
        actor = make(transport, settings)
        setup_logging(actor.service, actor.instance, level=settings.log_level, format=settings.log_format)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, actor.request_drain)
        log.info("starting", epoch=actor.epoch)
        await actor.run()
    except* PageantError as group:
        errors = _leaves(group)
        for error in errors:
            # What is wrong with a setting or a checkpoint is in the words; a defect needs its trace.
            trace = error.__cause__ if not isinstance(error, HOPELESS) else None
            log.error("fatal", error=str(error), type=type(error).__name__, exc_info=trace)
        status = EXIT_CONFIG if all(isinstance(error, HOPELESS) for error in errors) else EXIT_FATAL
    finally:
        if transport is not None:
            transport.close()
    log.info("stopped", status=status)
    return status


def _leaves(group: BaseExceptionGroup[PageantError]) -> list[PageantError]:
    found: list[PageantError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
