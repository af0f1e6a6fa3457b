"""Assembles a store."""

from __future__ import annotations

from pathlib import Path

from services.store.actor import StoreActor
from services.store.backends.addresses import backend_at
from services.store.backends.blocks import BackendBlocks
from services.store.disk import DiskBlocks
from shared.config import Settings
from shared.errors import ConfigError
from shared.transport import Transport

PENDING_SHARE = 4  # 1 / 4 of its memory may wait for the disk, and as much for the backend, beside what is kept


def make(transport: Transport, settings: Settings) -> StoreActor:
    """One store.  Raises ConfigError where it may not keep anything, or cannot use its directory or its backend."""
    if not settings.memory.store_memory:
        raise ConfigError("store_memory is 0: give a store the bytes that it may keep, such as --store-memory 1GiB")
    memory, disk, backend = settings.memory, None, None
    max_pending = memory.store_memory // PENDING_SHARE
    address = backend_at(memory.store_backend) if memory.store_backend else None
    if memory.store_disk:
        disk = DiskBlocks(Path(memory.store_disk), memory.store_disk_size, max_pending)
    if address is not None:
        backend = BackendBlocks(address, max_pending)
    return StoreActor(transport, settings, disk, backend)
