"""The network's way from this host to the scheduler's."""

from __future__ import annotations

import socket as sockets
import time

from shared.errors import ConfigError

NAME_SECONDS = 15.0  # until the scheduler's name must lead somewhere; it may be starting
NAME_POLL = 0.2


class Way:
    """The way to the scheduler's host: at its begin others reach this one.

    A container that is taken from its network and put back has another address there; the way, asked again and again,
    tells.  It costs no packet and, after the first time, no look-up of a name.
    """

    def __init__(self, host: str) -> None:
        """Raises ConfigError where the host's name leads nowhere in `NAME_SECONDS`."""
        self.is_cut = False
        self._end = resolve(host)
        begin = self._look()
        if not begin:
            raise ConfigError(f"no way leads to the scheduler's host {host!r}")
        self.begin = begin

    def has_moved(self) -> bool:
        """Look again.  False where it begins where it did, and where at present there is none."""
        now = self._look()
        self.is_cut = not now
        if now in ("", self.begin):
            return False
        self.begin = now
        return True

    def _look(self) -> str:
        try:
            with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
                probe.connect((self._end, 1))
                return str(probe.getsockname()[0])
        except OSError:
            return ""


def resolve(host: str) -> str:
    """The IPv4 address behind a name, waited for: where the scheduler is just being replaced there is none."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            return sockets.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"no way leads to the scheduler's host {host!r}: {error}") from error
            time.sleep(NAME_POLL)
