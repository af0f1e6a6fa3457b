"""Where a process that serves blocks listens: beside its inbox."""

from __future__ import annotations

import socket
from pathlib import Path

from shared.data_link.addresses import ENDING, TCP, UNIX, listening_at, listening_at_port, listening_near

BUS_TCP = "tcp://"


def listen_beside(inbox: str, directory: Path, instance: str, secret: bytes) -> tuple[list[socket.socket], str]:
    """A socket in the runtime directory; or one at a free port of the same host, and one beside it for those that are
    on this host too.  And the address.  Raises OSError."""
    if inbox.startswith(BUS_TCP):
        listener = listening_at_port()
        address = moved(f"{TCP}:{listener.getsockname()[1]}", inbox)
        return [listener, listening_near(secret)], address
    path = directory / f"{instance}{ENDING}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [listening_at(path)], f"{UNIX}{path}"


def moved(address: str, inbox: str) -> str:
    """The address of a data link after its process has another one: it listens at all of its host."""
    if not address.startswith(TCP):
        return address
    host = inbox.removeprefix(BUS_TCP).rpartition(":")[0]
    return f"{TCP}{host}:{address.rpartition(':')[2]}"
