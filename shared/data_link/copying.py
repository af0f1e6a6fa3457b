"""Copies that leave what they wrote in the processor's cache, where its checksum is made next.

The C library copies blocks of this size with one instruction (`rep movsb`), for which AMD's processors go past the
cache: the checksum then reads from memory what was just there.  A loop of plain loads and stores does not.  A worker
with native kernels has a copy that makes the checksum on the way (kernels/cpu/native/blocks/copy_checked.cpp).
"""

from __future__ import annotations

from collections.abc import Callable

try:
    import numpy as np
except ImportError:  # a process without a model has none
    np = None  # type: ignore[assignment]

WORD = 8  # bytes

Copy = Callable[[memoryview, memoryview], int]  # fills the first with as many bytes; returns their CRC-32


def copy_into(place: memoryview, source: memoryview) -> None:
    """Fill `place` with as many bytes of `source`."""
    if np is None or len(place) % WORD:
        place[:] = source
    else:
        np.positive(np.frombuffer(source, np.uint64), out=np.frombuffer(place, np.uint64))
