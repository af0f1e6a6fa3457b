"""Assembles the scheduler."""

from __future__ import annotations

import msgspec

from services.scheduler.actor import SchedulerActor
from services.scheduler.policy import Policy
from shared.config import Settings
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> SchedulerActor:
    """One scheduler with these settings."""
    return SchedulerActor(transport, settings, policy_of(settings))


def policy_of(settings: Settings) -> Policy:
    """The core's part of the settings: fields of the same names."""
    values = msgspec.structs.asdict(settings)
    return Policy(**{name: values[name] for name in Policy.__dataclass_fields__})
