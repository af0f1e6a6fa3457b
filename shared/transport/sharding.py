"""Rendezvous hashing (Thaler, Ravishankar 1996): the member for a key, few of which move when members come and go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rank(key: str, members: Iterable[str]) -> list[str]:
    """All members, the one responsible for `key` first."""
    return sorted(members, key=lambda member: hashlib.blake2b(f"{key}\0{member}".encode(), digest_size=8).digest())


def pick(key: str, members: Iterable[str]) -> str | None:
    """The member responsible for `key`, or None where there is none."""
    return next(iter(rank(key, members)), None)
