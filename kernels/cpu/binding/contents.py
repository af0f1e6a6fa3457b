"""The contents of tensors as C reads them: addresses mean nothing unless dtype, shape and layout are what C expects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import digest
from kernels.ops.digest import Sums


def rows_of(tensor: Tensor) -> NDArray[np.uint8]:  # [n, bytes of a row]
    """The bytes of a tensor's last dimension, for all others."""
    n, k = row_shape(tensor)
    rows: NDArray[np.uint8] = tensor.detach().reshape(n, k).contiguous().view(torch.uint8).numpy()
    return rows


def row_shape(tensor: Tensor) -> tuple[int, int]:
    """Number and length of the rows of its last dimension."""
    return tensor.shape[:-1].numel(), tensor.shape[-1] if tensor.ndim else 1


def address_of_sums(sums: Sums, count: int = 1) -> int:
    """Where C adds to the sums of so many tensors' rows.  Raises ValueError unless they have room for just that."""
    if sums.dtype != np.uint64 or sums.shape != (count, digest.WORDS) or not sums.flags.c_contiguous:
        raise ValueError(f"sums are {sums.dtype} {sums.shape}, expected {digest.WORDS} of uint64 for each of {count}")
    return address_of(sums)


def address_of(array: NDArray[Any]) -> int:
    """Of its first element."""
    return int(array.__array_interface__["data"][0])  # array.ctypes would import a module


def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless C can read the tensor as this."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError(
            f"expected contiguous {dtype} {list(shape)} on the CPU, got {tensor.dtype} {list(tensor.shape)}"
        )
