"""Assembles the scheduler."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from services.scheduler.actor import SchedulerActor
from services.scheduler.policy import Policy
from services.scheduler.recorder import RecordedScheduler
from services.scheduler.scheduler import Scheduler
from services.scheduler.segments import Segments
from shared.config import Settings
from shared.transport import Transport

log = structlog.get_logger()


def make(transport: Transport, settings: Settings) -> SchedulerActor:
    """One scheduler with these settings."""
    return SchedulerActor(transport, settings, make_core(settings))


def make_core(settings: Settings) -> Scheduler:
    """The core, and with `record` one that writes down what it is asked."""
    policy = policy_of(settings)
    if not settings.record:
        return Scheduler(policy)

    def lost(reason: str) -> None:
        log.error("recording_lost", file=settings.record, reason=reason)

    log.info("recording", file=settings.record, max_bytes=settings.record_bytes)
    return RecordedScheduler(policy, Segments(Path(settings.record), settings.record_bytes, lost))


def policy_of(settings: Settings) -> Policy:
    """The core's part of the settings: fields of the same names."""
    values = msgspec.structs.asdict(settings)
    return Policy(**{name: values[name] for name in Policy.__dataclass_fields__})
