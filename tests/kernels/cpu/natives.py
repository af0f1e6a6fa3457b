"""The native library in the builds that the tests go through; one that cannot be had skips, saying why."""

from __future__ import annotations

import pytest

from kernels.cpu.binding.build import NATIVE
from kernels.cpu.binding.loading import load
from kernels.cpu.binding.native import Native, NativeUnavailable

# What the build is for -> target and macros.
BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "native": (NATIVE, ()),
    "avx2": ("x86-64-v3", ()),
    "bf16-dot": (NATIVE, ("PG_EMULATE_BF16",)),
}


def load_build(name: str) -> Native:
    target, defines = BUILDS[name]
    try:
        return load(target, defines=defines)
    except NativeUnavailable as error:
        pytest.skip(f"no native kernels ({name}): {error}")
