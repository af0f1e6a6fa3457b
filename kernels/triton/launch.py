"""What every launch needs to know: block sizes, the type of matrix products, whether kernels are interpreted."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _probe() -> None:
    pass


INTERPRETED: bool = not isinstance(_probe, triton.JITFunction)  # on a CPU, one program after the other in numpy
MIN_DOT = 16  # rows, columns and depth that every target's matrix units take
STAGED_BYTES = 200 << 10  # of the 227 KiB that a program on an H100 can have
PROGRAMS = 8  # per multiprocessor, where the number of tiles is not known at launch
DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it has ended: Hopper and later, with a triton that knows it."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    options = import_module("triton.backends.nvidia.compiler").CUDAOptions
    return "launch_pdl" in options.__dataclass_fields__


def when(
    early: bool,
    rows: Tensor,
) -> dict[str, Any]:
    """Options of a launch whose kernel begins with `wait_for_others`: where it may be `early`, and a step has one row,
    its programs may be in place, and have read what no kernel writes, when the kernel before it ends (CUDA's
    programmatic dependent launch).  Programs of more rows need the place themselves."""
    is_early = early and len(rows) == 1 and launches_early(rows.device)
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


@triton.jit
def place_next(EARLY: tl.constexpr) -> None:
    """The next kernel's programs may be put in place from here on."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr) -> None:
    """Until the kernel before this one has ended, and with it all before that one.

    Every program of a kernel launched early calls this, before it reads or writes anything that another kernel
    writes or reads: a kernel that does not wait would end before the one before it, and the next one begin too soon.
    """
    if EARLY:
        gdc_launch_dependents()  # as `place_next`; only the first call counts
        gdc_wait()


def power_of_2(size: int, *, at_least: int = 1) -> int:
    """The smallest one that holds `size`."""
    return max(at_least, 1 << (size - 1).bit_length())


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What matrix products of `dtype` are computed in; the interpreter has no products of bfloat16."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else DOT_TYPES[dtype]


def stages_within(
    num_bytes: int,  # of shared memory that one stage of a pipeline takes
    most: int,
) -> int:
    """As many as fit, beside what a product of a tile itself takes."""
    return max(1, min(most, STAGED_BYTES // num_bytes))


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for an interpreted launch any number will do."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(most: int, device: torch.device) -> int:
    """One for each piece of work; where there is room for far more than there will be, some go over several."""
    return max(1, min(most, PROGRAMS * num_processors(device)))


def num_warps(block: int) -> int:
    """For a program that goes once over `block` elements."""
    return min(16, max(1, block // 256))
