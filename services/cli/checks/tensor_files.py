"""The headers of safetensors files: which tensors they hold, and whether the files are whole.

A header is its length in eight bytes, then JSON: {name: {"dtype", "shape", "data_offsets"}}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LENGTH_BYTES = 8
MAX_HEADER = 100 << 20  # the format's own limit
LFS_POINTER = b"version https://git-lfs"


class TensorHeader(msgspec.Struct, frozen=True):
    shape: list[int]
    data_offsets: tuple[int, int]


class Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class TensorFiles(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint together."""

    num_bytes: int
    num_elements: int


def read_tensor_files(directory: Path) -> TensorFiles:
    """Raises ModelError naming the file that is absent or not whole."""
    headers = [header for path in _files(directory) for header in _read_header(path)]
    return TensorFiles(
        num_bytes=sum(header.data_offsets[1] - header.data_offsets[0] for header in headers),
        num_elements=sum(math.prod(header.shape) for header in headers),
    )


def _files(directory: Path) -> Iterator[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        yield directory / SINGLE_FILE if (directory / SINGLE_FILE).is_file() else next(directory.glob("*.safetensors"))
        return
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values()))
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"cannot read {index}: {error}") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory} lacks {', '.join(missing[:3])}{' ...' if missing[3:] else ''} of {len(names)}")
    yield from (directory / name for name in names)


def _read_header(path: Path) -> list[TensorHeader]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise ModelError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there")
            length = int.from_bytes(start[:LENGTH_BYTES], "little")
            if length > min(size - LENGTH_BYTES, MAX_HEADER):
                raise ModelError(f"{path} is no safetensors file, or not whole")
            file.seek(LENGTH_BYTES)
            header = msgspec.json.decode(file.read(length), type=dict[str, Any])
        header.pop("__metadata__", None)
        tensors = msgspec.convert(list(header.values()), list[TensorHeader])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    end = LENGTH_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if end > size:
        raise ModelError(f"{path} is not whole: it has {size} bytes of {end}; download it again")
    return tensors
