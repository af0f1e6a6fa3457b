"""Addresses of data links: a socket in the runtime directory on one host, a port across hosts."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

from shared.errors import ProtocolError
from shared.transport.directory import BACKLOG, fits

UNIX, TCP = "unix:", "tcp:"
ENDING = ".blocks"
BUFFER_BYTES = 1 << 20  # of a socket: larger pieces wake the other side less often
_TCP = re.compile(r"tcp:(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")


def objection(address: str, directory: Path) -> str:
    """Why an address that came in a message is refused; empty where it is accepted."""
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        is_ours = path.parent == directory and path.name.endswith(ENDING) and fits(str(path))
        return "" if is_ours else "it is not in the runtime directory"
    return "" if _TCP.fullmatch(address) else "it is no address of a data link"


def connected(address: str, directory: Path, seconds: float) -> socket.socket:
    """A socket connected to an address, whose calls take so many seconds at most.  Raises ProtocolError for an address
    that is refused, OSError where nothing listens."""
    if wrong := objection(address, directory):
        raise ProtocolError(f"the address of a data link is refused: {wrong}")
    if address.startswith(UNIX):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place: str | tuple[str, int] = address.removeprefix(UNIX)
    else:
        host, _, port = address.removeprefix(TCP).rpartition(":")
        link, place = socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, int(port))
    try:
        prepare(link)
        link.settimeout(seconds)
        link.connect(place)
    except (OSError, OverflowError):
        link.close()
        raise
    return link


def listening_at(path: Path) -> socket.socket:
    """A socket that listens at a path where there is none.  Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _bound(listener, str(path))


def listening_at_port(host: str = "") -> socket.socket:
    """A socket that listens at a free port.  Raises OSError."""
    return _bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, 0))


def _bound(listener: socket.socket, place: str | tuple[str, int]) -> socket.socket:
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def prepare(link: socket.socket) -> None:
    """Buffers for large pieces, and no wait for more before a small one leaves."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if link.family == socket.AF_INET:
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
