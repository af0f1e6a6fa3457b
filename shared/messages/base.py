"""The one way in which a message is declared.

Messages are frozen, columnar where they repeat, and only ever grow at the end: a new field is appended, with a
default, so that the previous version's bytes still decode.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """A frozen array-encoded struct, tagged by its class name."""
