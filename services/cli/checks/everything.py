"""All checks in a row, in the order in which a newcomer wants to hear of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.cli.checks.access import check_access
from services.cli.checks.directories import check_directories
from services.cli.checks.finding import Finding
from services.cli.checks.memory import check_draft_memory, check_memory
from services.cli.checks.models import check_draft, check_model
from services.cli.checks.ports import check_ports
from shared.config import Settings


class Cast(msgspec.Struct, frozen=True):
    """How many replicas there will be, where that matters."""

    workers: int = 1
    gateways: int = 1


def examine(settings: Settings, cast: Cast, log_dir: Path | None = None) -> Iterator[Finding]:
    """What was found, subject by subject."""
    findings, checkpoint = check_model(settings.engine)
    yield from findings
    if checkpoint is not None:
        yield from check_memory(settings, checkpoint, workers=cast.workers)
    findings, draft = check_draft(settings.engine, settings.speculation)
    yield from findings
    if draft is not None:
        yield from check_draft_memory(settings.engine, settings.speculation)
    yield from check_access(settings)
    yield from check_ports(settings.gateway, settings.deployment, gateways=cast.gateways)
    yield from check_directories(settings.deployment, settings.observation, log_dir)
