"""Assembles the scheduler."""

from __future__ import annotations

import atexit
from pathlib import Path

import structlog

from services.scheduler.actor import SchedulerActor
from services.scheduler.membership.lives import FILE, Lives
from services.scheduler.publishing_actor import PublishingActor
from services.scheduler.recording.queued_recording import QueuedRecording
from services.scheduler.recording.recorder import RecordedScheduler
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.config import DeploymentSettings, Settings
from shared.processes.standard_streams import LAST_WORDS_SECONDS
from shared.transport import Transport

log = structlog.get_logger()


def make(transport: Transport, settings: Settings) -> SchedulerActor:
    """One scheduler with these settings.  Raises ConfigError where events cannot be published at their address."""
    kind = PublishingActor if settings.events.kv_events else SchedulerActor
    return kind(transport, settings, make_core(settings), make_lives(settings.deployment))


def make_lives(settings: DeploymentSettings) -> Lives:
    """Counted in the runtime directory, where there is one."""
    file = settings.runtime_path / FILE

    def lost(reason: str) -> None:
        log.warning("epoch_not_kept", file=str(file), reason=reason)

    return Lives(file if file.parent.is_dir() else None, lost)


def make_core(settings: Settings) -> Scheduler:
    """The core, and with `record` one that writes down what it is asked."""
    policy, file, max_bytes = policy_of(settings), settings.observation.record, settings.observation.record_bytes
    if not file:
        return Scheduler(policy)

    def ended(reason: str) -> None:
        log.error("recording_ended", file=file, reason=reason)

    log.info("recording", file=file, max_bytes=max_bytes)
    recording = QueuedRecording(Path(file), max_bytes, on_end=ended)
    atexit.register(recording.close, LAST_WORDS_SECONDS)  # writes the last calls
    return RecordedScheduler(policy, recording)


def policy_of(settings: Settings) -> Policy:
    """The core's part of the settings: fields of the same names."""
    values = settings.flat()
    if not settings.engine.batch_invariant:  # what is computed again may differ without anything being wrong
        values = {**values, "verify_fetches": 0}
    return Policy(**{name: values[name] for name in Policy.__dataclass_fields__})
