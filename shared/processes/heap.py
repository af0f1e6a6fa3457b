"""Memory that the C library keeps when it was freed."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give it back to the system: between small pieces that stay it can be much."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # of glibc
        library.malloc_trim(ctypes.c_size_t(0))
