"""The data link of a process that serves blocks: it listens beside the process's inbox."""

from __future__ import annotations

import secrets
from pathlib import Path

from shared.data_link.addresses import ENDING, TCP, UNIX, listening_at, listening_at_port, listening_near
from shared.data_link.server import BlockHolder, BlockServer

BUS_TCP = "tcp://"
SECRET_BYTES = 32


class DataLink:
    """Listens until it is closed: at a socket in the runtime directory; or at a free port of the inbox's host, and at
    one beside it for those that are on this host too."""

    def __init__(self, inbox: str, directory: Path, instance: str, holder: BlockHolder) -> None:
        """Raises OSError."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        if inbox.startswith(BUS_TCP):
            listeners = [listening_at_port(), listening_near(self.secret)]
            self.address = f"{TCP}:{listeners[0].getsockname()[1]}"
            self.move(inbox)
        else:
            path = directory / f"{instance}{ENDING}"
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            listeners, self.address = [listening_at(path)], f"{UNIX}{path}"
        self._server = BlockServer(listeners, self.secret, holder)

    @property
    def num_connections(self) -> int:
        return self._server.num_links

    def move(self, inbox: str) -> None:
        """Its process has another address.  At a port it listens at all addresses of the host."""
        if self.address.startswith(TCP):
            host = inbox.removeprefix(BUS_TCP).rpartition(":")[0]
            self.address = f"{TCP}{host}:{self.address.rpartition(':')[2]}"

    def close(self) -> None:
        self._server.close()
        if self.address.startswith(UNIX):
            Path(self.address.removeprefix(UNIX)).unlink(missing_ok=True)
