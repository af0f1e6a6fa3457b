"""Sources whose tensors are numbers and nothing else; among them weights that are made up."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from engine.description.names import Part
from engine.description.reading import tensors_of
from engine.description.spec import ModelSpec
from engine.weights.digest import WeightDigest
from engine.weights.formats import DTYPES
from engine.weights.inventory import QuantisedMatrix
from engine.weights.kv_scales import KVScales
from engine.weights.pieces import copied, view_of
from engine.weights.quantised.form import Quantisation
from kernels.ops.digest import Sums
from kernels.ops.linears.codes import Codes

DUMMY_PART = 1 << 20  # random numbers made at a time
MAX_FILLING = 16  # threads that make them


class PlainWeights:
    """What a source says that has neither codes nor scales, nor files with a digest."""

    def sums(self, *parts: Part) -> Sums | None:
        return None

    def take_codes(self, part: Part) -> Codes | None:
        return None

    def quantised_as(self, part: Part) -> QuantisedMatrix | None:
        return None

    @property
    def quantisation(self) -> Quantisation | None:
        return None

    def kv_scales(self) -> tuple[KVScales, ...]:
        return ()

    @property
    def files(self) -> list[Path]:
        return []


class DummyWeights(PlainWeights):
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
        tensor = torch.empty(part.shape, dtype=self.dtype)

        def fill(index: int, piece: Tensor) -> None:
            generator = torch.Generator().manual_seed(self._seeds[part.name] + (index << 32))
            piece.copy_(torch.randn(piece.shape, generator=generator).mul_(self._spread))

        pieces = torch.split(tensor.flatten(), DUMMY_PART)  # all at once they would be there in float32 too
        if len(pieces) == 1:
            fill(0, pieces[0])
            return tensor
        with ThreadPoolExecutor(min(len(pieces), MAX_FILLING, os.cpu_count() or 1)) as pool:  # one fills 0.2 GB/s
            list(pool.map(fill, range(len(pieces)), pieces))
        return tensor

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        return copied(self.take(part), out, rounded or out.dtype)

    def watch(self, digest: WeightDigest) -> None:
        """The configuration says all that there is to say of them."""

    def release(self) -> None:
        self._made.clear()
