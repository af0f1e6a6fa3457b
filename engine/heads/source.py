"""A draft head's tensors: from files of its own, or out of the model's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.description.draft_head import HeadSpec
from engine.description.head_tensors import HeadTensors, check_tensors, map_head, plain_name
from engine.description.names import Part, Shape, TensorMap
from engine.description.spec import ModelSpec
from engine.weights.digest import WeightDigest
from engine.weights.files import open_file, tensor_files
from engine.weights.pieces import view_of
from engine.weights.plain import PlainWeights
from shared.errors import ModelError


class HeadSource(PlainWeights):
    """A `engine.weights.source.WeightSource` of the head's layers, with what stands around them."""

    def __init__(self, directory: Path, spec: HeadSpec, target: ModelSpec) -> None:
        """Raises ModelError naming the tensor and what is wrong of it."""
        self._readers = _readers(directory, is_plain=not spec.in_checkpoint)
        self._taken: dict[str, Tensor] = {}
        self.head: HeadTensors = map_head(spec, target, self._readers.keys())
        check_tensors(spec, self.head, target, {name: one.header for name, one in self._readers.items()})
        self.tensors: TensorMap = self.head.layers
        formats = {self._readers[part.name].header[0] for part in self.head.parts() if len(part.shape) > 1}
        self.dtype = torch.bfloat16 if formats == {"BF16"} else torch.float32

    def ids(self, spec: HeadSpec, target: ModelSpec) -> Tensor | None:  # [drafts' vocabulary] int64
        """The target's id of each draft; None: the same.  Raises ModelError for ids that the target does not have."""
        if not self.head.ids:
            return None
        offsets = self._stored(self.head.ids).to(torch.int64)
        self.release()
        ids = torch.arange(len(offsets)) + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
            raise ModelError(f"tensor d2t names a token outside the model's vocabulary of {target.vocab_size}")
        return ids

    @property
    def num_elements(self) -> int:
        """Of its own tensors."""
        return sum(math.prod(part.wanted) for part in self.head.parts())

    def _stored(self, name: str) -> Tensor:
        if name not in self._taken:
            self._taken[name] = self._readers[name].read()
        return self._taken[name]

    def take(self, part: Part) -> Tensor:
        return view_of(part, self._stored(part.name))

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        return out.copy_(self.take(part).to(rounded or out.dtype))

    def watch(self, digest: WeightDigest) -> None:
        """Heads are in no digest: whatever they draft, the tokens are the target's."""

    def release(self) -> None:
        self._taken.clear()


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of an open file."""

    file: Any
    name: str

    @property
    def header(self) -> tuple[str, Shape]:
        piece = self.file.get_slice(self.name)
        return piece.get_dtype(), tuple(piece.get_shape())

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor


def _readers(directory: Path, *, is_plain: bool) -> Mapping[str, _Stored]:
    """By name; of a head of its own in one spelling."""
    if any(directory.glob("*.bin")) and not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has PyTorch files (*.bin), which are not served: convert them to safetensors")
    opened = {file: (open_file(directory / file), names) for file, names in tensor_files(directory).items()}
    found = {name: _Stored(file, name) for file, names in opened.values() for name in names}
    return {plain_name(name): one for name, one in found.items()} if is_plain else found
