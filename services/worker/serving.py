"""The data link over which a worker gives its blocks to others."""

from __future__ import annotations

import secrets
from pathlib import Path

import structlog

from services.worker.served import ServedBlocks
from shared.config import Settings
from shared.data_link.addresses import UNIX
from shared.data_link.listening import listen_beside, moved
from shared.data_link.server import BlockServer
from shared.messages import StoreCapacity

log = structlog.get_logger()

SECRET_BYTES = 32


class BlockService:
    """Listens until it is closed."""

    def __init__(self, inbox: str, directory: Path, instance: str, served: ServedBlocks) -> None:
        """Raises OSError."""
        self._secret = secrets.token_bytes(SECRET_BYTES)
        listeners, self._address = listen_beside(inbox, directory, instance, self._secret)
        self._server = BlockServer(listeners, self._secret, served)

    @classmethod
    def opened(cls, settings: Settings, inbox: str, instance: str, served: ServedBlocks) -> BlockService | None:
        """None where blocks are not shared, or where nothing can listen."""
        if not shares(settings):
            return None
        try:
            return cls(inbox, settings.deployment.runtime_path, instance, served)
        except OSError as error:
            log.warning("blocks_not_shared", reason=str(error))
            return None

    @property
    def offer(self) -> StoreCapacity:
        return StoreCapacity(self._address, self._secret, 0)

    def move(self, inbox: str) -> None:
        """Its process has another address."""
        self._address = moved(self._address, inbox)

    def close(self) -> None:
        self._server.close()
        if self._address.startswith(UNIX):
            Path(self._address.removeprefix(UNIX)).unlink(missing_ok=True)


def shares(settings: Settings) -> bool:
    """Whether its blocks may be read by others: what passes a data link across hosts is not encrypted."""
    chosen, deployment = settings.memory.share_blocks, settings.deployment
    return chosen == "on" or (chosen == "auto" and (deployment.transport == "ipc" or deployment.worker_role != "both"))
