"""What every launch needs to know: block sizes, the type of matrix products, whether kernels are interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _probe() -> None:
    pass


INTERPRETED: bool = not isinstance(_probe, triton.JITFunction)  # on a CPU, one program after the other in numpy
MIN_DOT = 16  # rows, columns and depth that every target's matrix units take
STAGED_BYTES = 200 << 10  # of the 227 KiB that a program on an H100 can have
PROGRAMS = 8  # per multiprocessor, where the number of tiles is not known at launch
DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
