"""Whether a worker gives its blocks to others, and the data link over which it does."""

from __future__ import annotations

import structlog

from services.worker.blocks.served import ServedBlocks
from shared.config import Settings
from shared.data_link.listening import DataLink

log = structlog.get_logger()


def open_link(settings: Settings, inbox: str, instance: str, served: ServedBlocks) -> DataLink | None:
    """None where blocks are not shared, or where nothing can listen."""
    if not shares(settings):
        return None
    try:
        return DataLink(inbox, settings.deployment.runtime_path, instance, served)
    except OSError as error:
        log.warning("blocks_not_shared", reason=str(error))
        return None


def shares(settings: Settings) -> bool:
    """Whether its blocks may be read by others: what passes a data link across hosts is not encrypted."""
    chosen, deployment = settings.memory.share_blocks, settings.deployment
    return chosen == "on" or (chosen == "auto" and (deployment.transport == "ipc" or deployment.worker_role != "both"))
