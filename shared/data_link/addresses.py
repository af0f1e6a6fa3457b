"""Addresses of data links: a socket in the runtime directory on one host, a port across hosts.

What listens at a port listens on its own host too, at an abstract name made from its secret.  A process that can
connect to that name is on the same host, in the same network namespace, whatever hosts are called; no file is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
from pathlib import Path

from shared.errors import ProtocolError
from shared.transport.directory import bound, fits

UNIX, TCP = "unix:", "tcp:"
ENDING = ".blocks"
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # lost after a minute
BUFFER_BYTES = 1 << 20  # of a socket: larger pieces wake the other side less often
_TCP = re.compile(r"tcp:(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")


def objection(address: str, directory: Path) -> str:
    """Why an address that came in a message is refused; empty where it is accepted."""
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        is_ours = path.parent == directory and path.name.endswith(ENDING) and fits(str(path))
        return "" if is_ours else "it is not in the runtime directory"
    found = _TCP.fullmatch(address)
    return "" if found is not None and int(found["port"]) < 1 << 16 else "it is no address of a data link"


def connected(address: str, directory: Path, seconds: float, secret: bytes) -> socket.socket:
    """A socket connected to an address, whose calls take so many seconds at most.  Raises ProtocolError for an address
    that is refused, OSError where nothing listens."""
    if wrong := objection(address, directory):
        raise ProtocolError(f"the address of a data link is refused: {wrong}")
    if address.startswith(UNIX):
        return _connected(socket.AF_UNIX, address.removeprefix(UNIX), seconds)
    with contextlib.suppress(OSError):
        return _connected(socket.AF_UNIX, near_name(secret), seconds)
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return _connected(socket.AF_INET, (host, int(port)), seconds)


def _connected(family: int, place: bytes | str | tuple[str, int], seconds: float) -> socket.socket:
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(link)
        link.settimeout(seconds)
        link.connect(place)
    except OSError:
        link.close()
        raise
    return link


def near_name(secret: bytes) -> bytes:
    """Where one that has this secret and listens at a port listens for those on its own host."""
    digest = hashlib.blake2b(secret, digest_size=16, person=b"pageant-near").hexdigest()
    return b"\0pageant-" + digest.encode()


def listening_at(path: Path) -> socket.socket:
    """A socket that listens at a path where there is none.  Raises OSError."""
    return bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))


def listening_near(secret: bytes) -> socket.socket:
    """A socket that listens for those on this host that know a secret.  Raises OSError."""
    return bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), near_name(secret))


def listening_at_port(host: str = "") -> socket.socket:
    """A socket that listens at a free port.  Raises OSError."""
    return bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, 0))


def prepare(link: socket.socket) -> None:
    """Buffers for large pieces, and no wait for more before a small one leaves."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if link.family == socket.AF_INET:
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host may vanish without a word
            for option, value in KEEPALIVE.items():
                link.setsockopt(socket.IPPROTO_TCP, option, value)
