"""Compiles kernels for a GPU that is not there, and says what its own tools make of them.

Triton compiles at a kernel's first launch for the device of its driver; here the driver is one that only names a
device, and a launch stops once it is compiled.  Nothing runs, so what the launches return is not to be looked at.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

HOPPER = ("cuda", 90, 32)
MI300 = ("hip", "gfx942", 64)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as it would be launched."""

    name: str
    num_warps: int
    shared: int  # bytes
    is_early: bool  # it may begin before the one before it has ended
    assembly: dict[str, Any]  # by stage

    def resources(self) -> tuple[int, int]:
        """Registers of a thread, and bytes that it spills, as the CUDA tools that come with triton tell it."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.assembly["cubin"])
            file.flush()
            told = subprocess.run(
                [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        found = USAGE.search(told)
        assert found is not None, told
        registers, stack, _, local = map(int, found.groups())
        return registers, stack + local


class NamedDevice:
    """As much of a driver as a compiler asks for."""

    def __init__(self, target: tuple[str, int | str, int]) -> None:
        self._target = GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(target: tuple[str, int | str, int], *, variants: bool = True) -> Iterator[list[Compiled]]:
    """Launches within are compiled for the target, and collected; without `variants` a kernel's first one.

    Triton must not be interpreting.
    """
    found: list[Compiled] = []
    names: set[str] = set()

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            if kernel.fn.__name__ in names and not variants:
                return
            names.add(kernel.fn.__name__)
            made = kernel.warmup(*args, grid=grid, **options)
            known, name = made.metadata, kernel.fn.__name__
            is_early = getattr(known, "launch_pdl", False)
            found.append(Compiled(name, known.num_warps, known.shared, is_early, made.asm))

        return compile_only

    driver.set_active(NamedDevice(target))
    with patch.object(triton.JITFunction, "__getitem__", launch):
        yield found
