"""Assembles a store."""

from __future__ import annotations

from pathlib import Path

from services.store.actor import StoreActor
from services.store.disk import DiskBlocks
from shared.config import Settings
from shared.errors import ConfigError
from shared.transport import Transport

PENDING_SHARE = 4  # of its memory, which may wait for the disk beside what is kept


def make(transport: Transport, settings: Settings) -> StoreActor:
    """One store.  Raises ConfigError where it may not keep anything, or cannot use its directory."""
    if not settings.memory.store_memory:
        raise ConfigError("store_memory is 0: give a store the bytes that it may keep, such as --store-memory 1GiB")
    memory, disk = settings.memory, None
    if memory.store_disk:
        disk = DiskBlocks(Path(memory.store_disk), memory.store_disk_size, memory.store_memory // PENDING_SHARE)
    return StoreActor(transport, settings, disk)
