"""The contents of tensors as C reads them: addresses mean nothing unless dtype, shape and layout are what C expects."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import digest
from kernels.ops.digest import Sums


def content_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor."""
    content: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return content


def address_of_sums(sums: Sums, tensor: Tensor) -> int:
    """Where C writes the chunk sums of a tensor.  Raises ValueError unless they have room for just that."""
    wanted = digest.num_chunks(tensor.nbytes), 2
    if sums.dtype != np.uint64 or sums.shape != wanted or not sums.flags.c_contiguous:
        raise ValueError(f"sums of {tensor.nbytes} bytes are {sums.dtype} {sums.shape}, expected {wanted} of uint64")
    return int(sums.ctypes.data)


def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless C can read the tensor as this."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError(
            f"expected contiguous {dtype} {list(shape)} on the CPU, got {tensor.dtype} {list(tensor.shape)}"
        )
