"""Hosts and origins as the settings write them: which clients reach a server, and under which names.

Knows no transport and no settings; `shared.config` and the servers call it.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from shared.errors import ConfigError

ANY = "*"
KEYS_ADVICE = "other machines can use it without a key: set api_keys_file or api_keys, or host=127.0.0.1"
LOCAL_NAME = "localhost"
NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or address, with or without brackets, leads to this machine and nowhere else."""
    bare = host.strip("[]").rstrip(".").lower()
    if bare == LOCAL_NAME or bare.endswith(f".{LOCAL_NAME}"):  # RFC 6761: no name server is asked for these
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def bare_host(header: str) -> str:
    """The name or address in a Host header, without its port; empty where the header is malformed."""
    if not header or any(character in header for character in "@/?#\\") or not header.isprintable():
        return ""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port  # a malformed port is an error too
    except ValueError:
        return ""
    return (parts.hostname or "").rstrip(".")


def read_hosts(text: str) -> tuple[str, ...]:
    """The setting `allowed_hosts`: names and addresses without ports, `*.domain`, or `*`.  Raises ConfigError."""
    found = [entry.strip("[]") for entry in _entries(text.lower())]
    for entry in found:
        if entry != ANY and not NAME.fullmatch(entry) and not _is_address(entry):
            raise ConfigError(
                f"allowed_hosts: {entry[:64]!r} is not a host; write names or addresses without ports, *.domain, or *"
            )
    return tuple(found)


def read_origins(text: str) -> tuple[str, ...]:
    """The setting `cors_allow_origins`: `scheme://host[:port]` as browsers send it, or `*`.  Raises ConfigError."""
    found = _entries(text)
    for entry in found:
        if entry != ANY and not ORIGIN.fullmatch(entry):
            raise ConfigError(
                f"cors_allow_origins: {entry[:64]!r} is not an origin; write scheme://host[:port] in lower case, or *"
            )
    return tuple(found)


def answers_to(header: str, allowed: tuple[str, ...]) -> bool:
    """Whether a Host header names this server: a loopback name always does, others where they are allowed."""
    name = bare_host(header)
    if not name:
        return False
    return is_loopback(name) or any(
        one in (ANY, name) or (one.startswith("*.") and name.endswith(one[1:])) for one in allowed
    )


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
