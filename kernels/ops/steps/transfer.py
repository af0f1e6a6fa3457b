"""What a step brings to the device and takes from it: copies that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A point in what was launched."""

    def wait(self) -> None:
        """Until everything before it is done."""
        ...


class Passed:
    """Where everything is done at once."""

    def wait(self) -> None:
        pass


class DeviceMark:
    """The wait takes no processor."""

    def __init__(self) -> None:
        make: Callable[..., Any] = torch.cuda.Event
        self._event = make(blocking=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Pinned memory is the allocator's to keep until the device has read it; on a CPU the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else send(tensor, device)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is there when what was launched until now is done; of a CPU's the tensor itself."""
    return tensor if tensor.device.type == "cpu" else receive(tensor)


def mark(device: torch.device) -> Mark:
    """Behind what was launched until now."""
    return DeviceMark() if device.type == "cuda" else Passed()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def receive(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
