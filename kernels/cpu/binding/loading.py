"""Loads the native library for this machine, and compares it with the references in `kernels.ops` before it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from kernels.cpu.binding import abi
from kernels.cpu.binding.build import NATIVE, Announce, BuildError, library
from kernels.cpu.binding.native import Native, NativeUnavailable
from kernels.cpu.binding.self_check import first_difference


def load(target: str = NATIVE, *, defines: Sequence[str] = (), announce: Announce = lambda compiler: None) -> Native:
    """The library for this machine, checked against the references.  Raises NativeUnavailable."""
    try:
        with library(target, defines=defines, announce=announce) as path:
            return load_file(path)
    except BuildError as error:
        raise NativeUnavailable(str(error)) from error


def load_compiled() -> Native | None:
    """The library where it is there already; None where it would have to be compiled, or does not serve."""
    try:
        with library(may_compile=False) as path:
            return load_file(path)
    except (BuildError, NativeUnavailable):
        return None


def checked_copy() -> Callable[[memoryview, memoryview], int] | None:
    """`Library.copy_checked`, where the library is there already and this processor has the instructions."""
    native = load_compiled()
    return native.copy_checked if native is not None and native.copies_checked else None


@cache
def load_file(path: Path) -> Native:
    """A library that is loaded twice is the same one, with the same team.  Raises NativeUnavailable."""
    try:
        functions = abi.bind(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the library cannot be loaded: {error}") from error
    if functions.pg_abi() != abi.VERSION:
        raise NativeUnavailable(f"the library has interface {functions.pg_abi()}, wanted {abi.VERSION}")
    native = Native(functions)
    if wrong := first_difference(native):
        raise NativeUnavailable(f"{wrong} differs from its reference on this processor")
    return native
