"""Where a leader waits for its ranks, as users write it."""

from __future__ import annotations

import re

from shared.errors import ConfigError

_ADDRESS = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")


def read_address(text: str) -> tuple[str, int]:
    """Host and port.  Raises ConfigError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ConfigError(f"the leader's address is {text!r}, but must be tcp://HOST:PORT")
    return found["host"], int(found["port"])
