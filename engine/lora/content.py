"""An adapter's two files, read once: the digest is that of the bytes whose tensors are served.

Tensors are views of these bytes.  safetensors' own `load` copies each of them, half of the time that loading an adapter
took; a mapped file is not copied either, but may change, or end, while it is read.
The format is https://github.com/huggingface/safetensors#format: the header's length, the header, the values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from engine.lora.config import CONFIG_NAME, WEIGHTS_NAME, LoraConfig, read_lora_config
from shared.errors import ModelError

DIGEST_BYTES = 16
LENGTH_BYTES = 8
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class StoredView(msgspec.Struct):
    """What the header says of a tensor."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]  # in bytes, behind the header


@dataclass(frozen=True, slots=True)
class AdapterContent:
    config: LoraConfig
    tensors: dict[str, Tensor]
    digest: str


def read_content(directory: Path) -> AdapterContent:
    """Raises ModelError naming the file, and the key or tensor that is at fault."""
    text, weights = (_read(directory / name) for name in (CONFIG_NAME, WEIGHTS_NAME))
    config = read_lora_config(bytes(text))
    try:
        begin = LENGTH_BYTES + int.from_bytes(weights[:LENGTH_BYTES], "little")
        tensors = _tensors(weights, begin)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such
        raise ModelError(f"{WEIGHTS_NAME} cannot be read: {error}") from error
    _check_finite(tensors, weights, begin)
    return AdapterContent(config, tensors, _digest(text, weights))


def _read(path: Path) -> bytearray:
    try:
        with path.open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            rest = memoryview(content)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # the system takes no path with a null character
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if rest:
        raise ModelError(f"{path.name} cannot be read: it became shorter meanwhile")
    return content


def _digest(*contents: bytearray) -> str:
    """Contents go with their lengths: so that no end of one is the beginning of another."""
    made = blake3()  # a third of the time of SHA-256, for which processors have instructions
    for content in contents:
        made.update(len(content).to_bytes(LENGTH_BYTES, "little"))
        made.update(content)
    return made.hexdigest()[: 2 * DIGEST_BYTES]


def _tensors(content: bytearray, begin: int) -> dict[str, Tensor]:
    """`begin`: of the values, behind the header.  Raises ValueError."""
    if len(content) < LENGTH_BYTES or begin > len(content):
        raise ValueError("it is shorter than its header")
    header = msgspec.json.decode(content[LENGTH_BYTES:begin], type=dict[str, msgspec.Raw])
    header.pop(METADATA, None)
    decoder = msgspec.json.Decoder(StoredView)
    wholes = {dtype: _whole(content, dtype) for dtype in DTYPES.values()}
    return {name: _view(name, decoder.decode(stored), content, begin, wholes) for name, stored in header.items()}


def _whole(content: bytearray, dtype: torch.dtype) -> Tensor:
    """All of it as values of one dtype: a tensor is cut out of it in half of the time that making one takes."""
    return torch.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)


def _view(
    name: str, stored: StoredView, content: bytearray, begin: int, wholes: Mapping[torch.dtype, Tensor]
) -> Tensor:
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise ValueError(f"{name} has the dtype {stored.dtype}; served are {', '.join(DTYPES)}")
    first, end = stored.data_offsets
    count = math.prod(stored.shape)
    if end - first != count * dtype.itemsize or begin + end > len(content):
        raise ValueError(f"{name}, {stored.dtype} {stored.shape}, is not at {stored.data_offsets} of the values")
    if not count:
        return torch.empty(stored.shape, dtype=dtype)
    if (begin + first) % dtype.itemsize:  # values that lie across words
        return torch.frombuffer(content[begin + first : begin + end], dtype=dtype).view(stored.shape)
    return wholes[dtype].as_strided(stored.shape, _strides(stored.shape), (begin + first) // dtype.itemsize)


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for place in range(len(shape) - 1, 0, -1):
        strides[place - 1] = strides[place] * shape[place]
    return strides


def _check_finite(tensors: Mapping[str, Tensor], content: bytearray, begin: int) -> None:
    """All values at once, where they have one dtype; only where one of them is not finite, tensor by tensor."""
    floating = {name: one for name, one in tensors.items() if one.is_floating_point() and one.numel()}
    dtypes = {one.dtype for one in tensors.values()}
    if floating and len(dtypes) == 1:
        (dtype,) = dtypes
        count = (len(content) - begin) // dtype.itemsize
        is_whole = begin % dtype.itemsize == 0
        if is_whole and _is_finite(torch.frombuffer(content, dtype=dtype, count=count, offset=begin)):
            return
    for name, tensor in floating.items():
        if not _is_finite(tensor):
            raise ModelError(f"{WEIGHTS_NAME}: {name} has values that are not finite")


def _is_finite(tensor: Tensor) -> bool:
    """The least and the greatest value tell it, and are not numbers where any value is none."""
    return all(math.isfinite(bound.item()) for bound in tensor.aminmax())
