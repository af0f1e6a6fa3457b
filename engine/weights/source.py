"""Checkpoint tensors, one at a time: from safetensors files, or made up from the description alone.

Every name, shape and dtype is checked against the description before the first tensor is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.description.names import Part, Parts, TensorMap
from engine.description.spec import ModelSpec
from engine.weights.digest import WeightDigest
from engine.weights.files import open_file, tensor_files
from engine.weights.formats import DTYPES
from engine.weights.inventory import QuantisedMatrix, StoredTensor, take_inventory
from engine.weights.kv_scales import KVScales, read_kv_scales
from engine.weights.pages import drop_pages
from engine.weights.pieces import as_linear, copied, is_exact, rows_of_codes, view_of
from engine.weights.plain import DummyWeights
from engine.weights.quantised.form import Quantisation
from engine.weights.quantised.kept import common_form, decoded_form, kept_slots
from engine.weights.quantised.module_tensors import ModuleTensors
from engine.weights.quantised.reading import read_quantisation
from kernels.ops.digest import Sums
from kernels.ops.linears.codes import Codes, same_order
from shared.errors import ModelError
from shared.processes.heap import trim_heap

HALVES = {"F16", "BF16"}
STORED = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource(Protocol):
    """Gives out tensors as they are stored, quantised ones as their values in float32.

    What was taken holds until the next release.
    """

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

    def take_codes(self, part: Part) -> Codes | None:
        """A quantised matrix as it is stored, its rows as the slot wants them; None: `take` alone gives it."""
        ...

    def quantised_as(self, part: Part) -> QuantisedMatrix | None:
        """How a part is quantised, without reading it; None: it is not."""
        ...

    @property
    def quantisation(self) -> Quantisation | None:
        """What the checkpoint's configuration says of it."""
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
        self._quantisation = read_quantisation(directory)
        files = tensor_files(directory)
        opened = {file: open_file(directory / file) for file in files}
        self._files = {name: opened[file] for file, names in files.items() for name in names}
        self._paths = {name: path for file, names in files.items() for path in [directory / file] for name in names}
        self._inventory = take_inventory(directory, spec, self._quantisation, self._headers())
        self.tensors = self._inventory.tensors
        self.dtype = self._dtype(spec)
        self._left = len(self._inventory.names)
        self._progress = progress or terminal_progress
        self._bar: Bar | None = None
        self._taken: dict[str, Tensor] = {}
        self._made = _Latest()
        self._digest: WeightDigest | None = None
        self._scales: dict[str, Tensor] = {}
        self._kv_scales = read_kv_scales(spec, self.tensors.table, self._files.keys(), self._take_scale)

    def _headers(self) -> dict[str, StoredTensor]:
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        return {
            name: StoredTensor(piece.get_dtype(), tuple(piece.get_shape()), self._paths[name])
            for name, piece in slices.items()
        }

    def _dtype(self, spec: ModelSpec) -> torch.dtype:
        """Of the matrices and of scales in 16 bits; where these differ, what config.json says."""
        plain, quantised = self._inventory.plain, self._inventory.quantised.values()
        names = [name for name, shape in plain.items() if len(shape) >= 2]
        found = {STORED[self._files[name].get_slice(name).get_dtype()] for name in names}
        scales = {self._files[name].get_slice(name).get_dtype() for one in quantised for name in one.names}
        found |= {STORED[dtype] for dtype in scales & HALVES}
        if len(found) == 1:
            return found.pop()
        return DTYPES.get(spec.dtype, torch.float32) if quantised else torch.float32

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

    @property
    def quantisation(self) -> Quantisation | None:
        return self._quantisation

    def quantised_as(self, part: Part) -> QuantisedMatrix | None:
        return self._inventory.quantised.get(part.name)

    def take(self, part: Part) -> Tensor:
        found = self.quantised_as(part)
        if found is None:
            return view_of(part, self._stored(part.name))
        values = self._made.values
        if values is None or self._made.key != (part.name, part.expert):
            codes = self._codes(found, part)
            values = self._made.values = codes.dequantised()
        return view_of(as_linear(part), values)

    def take_codes(self, part: Part) -> Codes | None:
        found = self.quantised_as(part)
        return None if found is None or not part.has_whole_rows else rows_of_codes(part, self._codes(found, part))

    def _codes(self, found: QuantisedMatrix, part: Part) -> Codes:
        """Of a stack one expert's; made once where several parts of it are taken one after the other."""
        if self._made.codes is None or self._made.key != (part.name, part.expert):
            stored = {suffix: self._stored(found.module + suffix) for suffix in found.suffixes}
            if (bias := f"{found.module}.bias") in self._inventory.zero_biases and bool(self._stored(bias).any()):
                raise ModelError(f"{self._paths[bias]}: tensor {bias} is not zero, and {found.module} has no bias")
            if part.expert is not None:
                stored = {suffix: tensor[part.expert] for suffix, tensor in stored.items()}
            try:
                codes = found.form.read(ModuleTensors(found.module, stored), found.matrix)
            except ModelError as error:
                raise ModelError(f"{self._paths[found.names[0]]}: {error}") from error
            self._made = _Latest((part.name, part.expert), codes)
        assert self._made.codes is not None
        return self._made.codes

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
        is_stored = part.is_whole and self.quantised_as(part) is None
        if self._digest is None or not is_stored or not is_exact(tensor.dtype, rounded or out.dtype):
            return copied(tensor, out, rounded or out.dtype)
        return self._digest.copied(part.name, tensor, out)

    def sums(self, *parts: Part) -> Sums | None:
        if self._digest is None:
            return None
        quantised = self._inventory.quantised
        for part in parts:
            if not part.is_whole or part.name in quantised:
                return None
        return self._digest.sums(*[part.name for part in parts])

    def release(self) -> None:
        """Drop the file's pages of all that has been taken."""
        if self._digest is not None:
            self._digest.settle()
        for tensor in self._taken.values():
            drop_pages(tensor)
        self._taken.clear()
        if self._made.codes is not None:
            self._made = _Latest()
            trim_heap()
        if self._bar is not None and not self._left:
            self._bar.close()


@dataclass(slots=True)
class _Latest:
    """The quantised matrix that was taken last: several parts may be pieces of it."""

    key: tuple[str, int | None] | None = None  # name of the part, and the expert of a stack
    codes: Codes | None = None
    values: Tensor | None = None


def open_weights(
    load_format: str, directory: Path, spec: ModelSpec, *, progress: Progress | None = None
) -> WeightSource:
    """What `load_format` names; raises ModelError for the checkpoint's faults."""
    return DummyWeights(spec) if load_format == "dummy" else Checkpoint(directory, spec, progress=progress)


def kept_codes(source: WeightSource, parts: Parts) -> list[Codes] | None:
    """Of matrices that are joined, as they are stored; None: their values have to be taken.

    Only when they are read is known whether their input features are in one order.
    """
    return None if common_form(parts, source.quantised_as) is None else _taken_codes(source, parts)


def decoded_codes(source: WeightSource, parts: Parts) -> list[Codes] | None:
    """The same of matrices that are decoded while they are multiplied, in the order of their input features."""
    found = None if decoded_form(parts, source.quantised_as) is None else _taken_codes(source, parts)
    return None if found is None or found[0].gather is not None else found


def _taken_codes(source: WeightSource, parts: Parts) -> list[Codes] | None:
    taken = [source.take_codes(part) for part in parts]
    found = [codes for codes in taken if codes is not None]
    return found if len(found) == len(parts) and same_order(found) else None


def has_codes(spec: ModelSpec, source: WeightSource) -> bool:
    """Whether some of a model's matrices are codes that kernels multiply as they are."""
    return bool(kept_slots(spec, source.tensors, source.quantised_as))
