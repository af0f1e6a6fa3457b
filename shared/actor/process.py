"""A process around one actor: event loop, signals, logs, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import structlog
import uvloop

from shared.actor.actor import Actor
from shared.actor.incident import Incidents
from shared.actor.status import STALLED, write_last_words
from shared.actor.watchdog import Watchdog
from shared.config import Settings, load_settings
from shared.errors import ConfigError, ModelError, PageantError
from shared.processes.descriptors import raise_limit
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.processes.logging import setup_logging
from shared.processes.standard_streams import LAST_WORDS_SECONDS, guard_standard_streams
from shared.transport import Transport, make_transport

log = structlog.get_logger()

HOPELESS = (ConfigError, ModelError)  # what EXIT_CONFIG says
STUCK = "the event loop is stuck: it handles no messages"


def run_actor(make: Callable[[Transport, Settings], Actor], settings: Settings | None = None) -> int:
    """Run one service until it stops; returns the process's exit status."""
    guard_standard_streams()
    try:
        settings = settings or load_settings()
    except PageantError as error:
        print(f"pageant: {error}", file=sys.stderr)
        return EXIT_CONFIG
    raise_limit()
    faulthandler.enable()  # a fault in native code leaves a stack
    status: int = uvloop.run(_main(make, settings))
    return status


async def _main(make: Callable[[Transport, Settings], Actor], settings: Settings) -> int:
    level, format = settings.observation.log_level, settings.observation.log_format
    setup_logging("starting", "", level=level, format=format)
    transport: Transport | None = None
    incidents: Incidents | None = None
    status = 0
    try:
        transport = make_transport(settings.deployment)
        actor = make(transport, settings)
        setup_logging(actor.service, actor.instance, level=level, format=format)
        actor.incidents = incidents = Incidents(settings, actor.service, actor.instance, actor.snapshot)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, actor.request_drain)
        loop.add_signal_handler(signal.SIGUSR1, actor.request_handover)
        log.info("starting", epoch=actor.epoch)
        with watched(actor, incidents):
            await actor.run()
    except* Exception as group:
        errors = _leaves(group)
        status = log_fatal(errors, incidents)
        write_last_words(settings.deployment, "; ".join(map(str, errors)))
    finally:
        if transport is not None:
            transport.close()
    log.info("stopped", status=status)
    return status


@contextlib.contextmanager
def watched(actor: Actor, incidents: Incidents) -> Iterator[None]:
    """While the actor lives, a watchdog observes its event loop."""

    def stall() -> None:
        actor.status_file.say(STALLED)
        actor.status_file.drain(LAST_WORDS_SECONDS)
        log.error("stalled", reason=STUCK)
        incidents.write(STUCK)

    seconds = actor.settings.deployment.stall_timeout
    watchdog = Watchdog(actor, seconds, on_stall=stall, on_recovery=lambda: log.info("stall_over"))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def log_fatal(errors: Sequence[Exception], incidents: Incidents | None) -> int:
    """Log the errors that end the process; returns its exit status, which is never 0."""
    for error in errors:
        # The text of an error says what is wrong with a setting or a checkpoint; a defect needs its trace.
        trace = (error.__cause__ or error) if not isinstance(error, HOPELESS) else None
        log.error("fatal", error=str(error), type=type(error).__name__, exc_info=trace)
        if incidents is not None and not isinstance(error, HOPELESS):
            incidents.write("fatal", error)
            incidents.drain(LAST_WORDS_SECONDS)
    return EXIT_CONFIG if all(isinstance(error, HOPELESS) for error in errors) else EXIT_FATAL


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
