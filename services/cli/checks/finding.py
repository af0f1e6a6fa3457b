"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """`wrong` keeps this machine from serving; a `note` does not."""

    verdict: Literal["ok", "note", "wrong"]
    subject: str
    text: str
