"""Checkpoint tensors, one at a time: from safetensors files, or made up from the description alone.

Every name, shape and dtype is checked against the description before the first tensor is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.description.names import Part, Shape, TensorMap
from engine.description.reading import tensors_of
from engine.description.spec import ModelSpec
from engine.weights.digest import WeightDigest
from engine.weights.formats import DTYPES
from engine.weights.kv_scales import KVScales, is_kv_scale, read_kv_scales
from engine.weights.pages import drop_pages
from kernels.ops.digest import Sums
from shared.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DUMMY_PART = 1 << 20  # random numbers made at a time
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # left by old exporters; never weights
NAMED_AT_MOST = 5  # tensors in one error message
STORED = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource(Protocol):
    """Gives out tensors as they are stored.  What was taken holds until the next release."""

    dtype: torch.dtype  # of all matrices, float32 where they differ
    tensors: TensorMap

    def take(self, part: Part) -> Tensor:
        """As the slot wants it; a view of what is stored, where it can be one."""
        ...

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        """Copy a part into `out`, which is contiguous and has its shape, and return `out`.

        Its values are `rounded` to another format before.
        """
        ...

    def sums(self, *parts: Part) -> Sums | None:
        """For the row sums of tensors that were taken, to which the caller adds before the next release.

        None where no digest is made of what the caller reads.
        """
        ...

    def kv_scales(self) -> tuple[KVScales, ...]:
        """Of every layer's fp8 KV cache; empty where the checkpoint has none."""
        ...

    @property
    def files(self) -> list[Path]:
        """That hold the tensors; none where they are made from the configuration."""
        ...

    def watch(self, digest: WeightDigest) -> None:
        """Have a digest made of all tensors that are taken from here on and released, and of the scales."""
        ...

    def release(self) -> None: ...


class Bar(Protocol):
    def update(self) -> object: ...

    def close(self) -> object: ...


Progress = Callable[[int], Bar]  # the number of tensors -> what is told of each


def terminal_progress(total: int) -> Bar:
    """A bar on standard error where that is a terminal, nothing otherwise."""
    from tqdm import tqdm

    bar: Bar = tqdm(total=total, desc="loading weights", unit="tensor", disable=None, leave=False)
    return bar


class Checkpoint:
    """The tensors of a description in a directory's files, which are mapped into memory: read when they are used.

    Raises ModelError naming the file, tensor and shapes.
    """

    def __init__(self, directory: Path, spec: ModelSpec, *, progress: Progress | None = None) -> None:
        files = _tensor_files(directory)
        found = {name for names in files.values() for name in names}
        self.tensors = _check_names(directory, spec, found)
        opened = {file: _open(directory / file) for file in files}
        self._files = {name: opened[file] for file, names in files.items() for name in names}
        self._paths = {name: directory / file for file, names in files.items() for name in names}
        expected = self.tensors.shapes()
        stored = {name: self._check(name, shape) for name, shape in expected.items()}
        dtypes = {stored[name] for name, shape in expected.items() if len(shape) >= 2}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._left = len(expected)
        self._progress = progress or terminal_progress
        self._bar: Bar | None = None
        self._taken: dict[str, Tensor] = {}
        self._digest: WeightDigest | None = None
        self._scales: dict[str, Tensor] = {}
        self._kv_scales = read_kv_scales(spec, self.tensors.table, found, self._take_scale)

    def kv_scales(self) -> tuple[KVScales, ...]:
        return self._kv_scales

    def _take_scale(self, name: str) -> Tensor:
        scale: Tensor = self._files[name].get_tensor(name)
        self._scales[name] = scale
        return scale

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(self._paths.values()))

    def watch(self, digest: WeightDigest) -> None:
        self._digest = digest
        for name, scale in self._scales.items():
            digest.add(name, scale)

    def take(self, part: Part) -> Tensor:
        return view_of(part, self._stored(part.name))

    def _stored(self, name: str) -> Tensor:
        """Once for all parts of it that are taken before the next release."""
        if name in self._taken:
            return self._taken[name]
        tensor: Tensor = self._files[name].get_tensor(name)
        self._taken[name] = tensor
        if self._digest is not None:
            self._digest.add(name, tensor)
        if self._bar is None:
            self._bar = self._progress(self._left)
        self._bar.update()
        self._left -= 1
        return tensor

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        tensor = self.take(part)
        if self._digest is None or not part.is_whole or not _is_exact(tensor.dtype, rounded or out.dtype):
            return _copied(tensor, out, rounded or out.dtype)
        return self._digest.copied(part.name, tensor, out)

    def sums(self, *parts: Part) -> Sums | None:
        if self._digest is None or not all(part.is_whole for part in parts):
            return None
        return self._digest.sums(*(part.name for part in parts))

    def release(self) -> None:
        """Drop the file's pages of all that has been taken."""
        if self._digest is not None:
            self._digest.settle()
        for tensor in self._taken.values():
            drop_pages(tensor)
        self._taken.clear()
        if self._bar is not None and not self._left:
            self._bar.close()

    def _check(self, name: str, expected: Shape) -> torch.dtype:
        part = self._files[name].get_slice(name)
        found, dtype = tuple(part.get_shape()), part.get_dtype()
        if found != expected:
            raise ModelError(f"{self._paths[name]}: tensor {name} has shape {list(found)}, expected {list(expected)}")
        if dtype not in STORED:
            raise ModelError(f"{self._paths[name]}: tensor {name} has dtype {dtype}, expected a floating-point one")
        return STORED[dtype]


class DummyWeights:
    """Random tensors, the same for the same description and seed: norms are one, biases and sinks zero."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0) -> None:
        self.tensors = tensors_of(spec)
        self.dtype = DTYPES.get(spec.dtype, torch.float32)
        self._spread = spec.initializer_range
        shapes = self.tensors.shapes()
        self._seeds = {name: seed * len(shapes) + index for index, name in enumerate(shapes)}
        self._made: dict[str, Tensor] = {}

    def take(self, part: Part) -> Tensor:
        if part.name not in self._made:
            self._made[part.name] = self._make(part)
        return view_of(part, self._made[part.name])

    def _make(self, part: Part) -> Tensor:
        if len(part.shape) == 1:
            is_norm = part.name.endswith("weight") and not part.plus_one
            return torch.ones(part.shape) if is_norm else torch.zeros(part.shape)
        generator = torch.Generator().manual_seed(self._seeds[part.name])
        tensor = torch.empty(part.shape, dtype=self.dtype)
        for piece in torch.split(tensor.flatten(), DUMMY_PART):  # all at once they would be there in float32 too
            piece.copy_(torch.randn(piece.shape, generator=generator).mul_(self._spread))
        return tensor

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        return _copied(self.take(part), out, rounded or out.dtype)

    def sums(self, *parts: Part) -> Sums | None:
        return None

    def kv_scales(self) -> tuple[KVScales, ...]:
        return ()

    @property
    def files(self) -> list[Path]:
        return []

    def watch(self, digest: WeightDigest) -> None:
        """The configuration says all that there is to say of them."""

    def release(self) -> None:
        self._made.clear()


def view_of(part: Part, stored: Tensor) -> Tensor:
    """What a slot wants of a stored tensor; a view of it wherever it can be one."""
    found = stored if part.expert is None else stored[part.expert]
    if part.transposed:
        found = found.T
    if part.rows is not None:
        found = found[part.rows]
    if part.head_order is not None:
        heads = found.view(-1, part.head_rows or len(part.head_order), *found.shape[1:])
        found = heads[:, list(part.head_order)].flatten(0, 1)
    if part.absorbed:
        found = found.T
    return found.float() + 1.0 if part.plus_one else found


def open_weights(
    load_format: str, directory: Path, spec: ModelSpec, *, progress: Progress | None = None
) -> WeightSource:
    """What `load_format` names; raises ModelError for the checkpoint's faults."""
    return DummyWeights(spec) if load_format == "dummy" else Checkpoint(directory, spec, progress=progress)


def _is_exact(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a format holds every value of the stored one."""
    return dtype in (stored, torch.float32)


def _copied(tensor: Tensor, out: Tensor, rounded: torch.dtype) -> Tensor:
    """Without a copy between where the format holds every value."""
    return out.copy_(tensor if _is_exact(tensor.dtype, rounded) else tensor.to(rounded))


def _open(path: Path) -> Any:
    """Imported here: made-up weights need no files, and so no library to read them."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _tensor_files(directory: Path) -> dict[str, list[str]]:
    """The tensor names in each file, by file name."""
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: _read_names(directory / SINGLE_FILE)}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    files: dict[str, list[str]] = {}
    for name, file in _read_index(index).items():
        if Path(file).name != file:
            raise ModelError(f"{index}: weight_map sends {name} to {file!r}, outside the checkpoint's directory")
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        missing = sorted(set(names) - set(_read_names(directory / file)))
        if missing:
            raise ModelError(f"{directory / file} lacks {_listing(missing)}, which {INDEX_FILE} says it holds")
    return files


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path} has no weight_map from tensor names to file names")
    return weight_map


def _read_names(path: Path) -> list[str]:
    return list(_open(path).keys())


def _check_names(directory: Path, spec: ModelSpec, found: set[str]) -> TensorMap:
    """The tensors to read, under the names that this checkpoint has for them."""
    tensors = tensors_of(spec, found)
    table = tensors.table
    expected = tensors.shapes()
    head = f"{table.head}.weight"
    if spec.tie_word_embeddings and head in found:  # of a tied pair, whichever is there stands for the embedding
        expected[head] = tensors.embedding.shape
        if tensors.embedding.name not in found:
            del expected[tensors.embedding.name]
            tensors = replace(tensors, embedding=Part(head, tensors.embedding.shape))
    missing = sorted(expected.keys() - found)
    if missing:
        raise ModelError(f"{directory} lacks {_listing(missing)} of the {len(expected)} tensors of {spec.architecture}")
    behind = (table.layer_prefix(spec.num_layers + index) for index in range(spec.unused_layers))
    unused = (*table.unused, *behind)
    others = (name for name in found - expected.keys() if not name.endswith(IGNORED_SUFFIXES))
    extra = sorted(name for name in others if not is_kv_scale(name) and not name.startswith(unused))
    if extra:
        raise ModelError(f"{directory} has {_listing(extra)}, which {spec.architecture} with this config.json has not")
    return tensors


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST])
    rest = len(names) - NAMED_AT_MOST
    return f"{shown} and {rest} more" if rest > 0 else shown
