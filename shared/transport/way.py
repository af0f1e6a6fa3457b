"""The network route from this host to the scheduler's."""

from __future__ import annotations

import socket as sockets
import time

from shared.errors import ConfigError

NAME_SECONDS = 15.0  # within which the scheduler's name must resolve; it may be starting
NAME_POLL = 0.2


class Way:
    """The route to the scheduler's host: others reach this host at its local address.

    A container that is taken from its network and put back has another address there, which shows when the route is
    looked up again.  That costs no packet and, after the first time, no look-up of a name.
    """

    def __init__(self, host: str) -> None:
        """Raises ConfigError where the host's name does not resolve within `NAME_SECONDS`."""
        self.is_cut = False
        self._end = resolve(host)
        begin = self._look()
        if not begin:
            raise ConfigError(f"the scheduler's host {host!r} cannot be reached")
        self.begin = begin

    def has_moved(self) -> bool:
        """Look the route up again.  False where it begins at the same address, or where there is none now."""
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
    """The IPv4 address behind a name; waits for it, since there is none while the scheduler is replaced."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            return sockets.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the scheduler's host {host!r} cannot be reached: {error}") from error
            time.sleep(NAME_POLL)
