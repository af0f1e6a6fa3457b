"""The layers of one stage of a pipeline, out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.description.names import Part
from engine.description.stages import Stage
from engine.weights.digest import WeightDigest
from engine.weights.inventory import QuantisedMatrix
from engine.weights.kv_scales import KVScales
from engine.weights.quantised.form import Quantisation
from engine.weights.source import WeightSource
from kernels.ops.codes import Codes
from kernels.ops.digest import Sums


class StageSource:
    """A `WeightSource` of what a stage has of another one."""

    def __init__(self, source: WeightSource, stage: Stage) -> None:
        self.dtype: torch.dtype = source.dtype
        self.tensors = stage.cut_tensors(source.tensors)
        self._source = source
        self._layers = stage.layers
        self._taken: set[str] = set()

    def take(self, part: Part) -> Tensor:
        self._taken.add(part.name)
        return self._source.take(part)

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        self._taken.add(part.name)
        return self._source.copied(part, out, rounded=rounded)

    def sums(self, *parts: Part) -> Sums | None:
        return self._source.sums(*parts)

    def take_codes(self, part: Part) -> Codes | None:
        self._taken.add(part.name)
        return self._source.take_codes(part)

    def quantised_as(self, part: Part) -> QuantisedMatrix | None:
        return self._source.quantised_as(part)

    @property
    def quantisation(self) -> Quantisation | None:
        return self._source.quantisation

    def kv_scales(self) -> tuple[KVScales, ...]:
        return self._source.kv_scales()[self._layers]

    @property
    def files(self) -> list[Path]:
        return self._source.files

    def watch(self, digest: WeightDigest) -> None:
        self._source.watch(digest)

    def release(self) -> None:
        self._source.release()

    def read_others(self) -> None:
        """What the stage has not taken, for a digest: that of the whole checkpoint, which all stages compare."""
        for part in self._source.tensors.parts():
            if part.name not in self._taken:
                self._taken.add(part.name)
                if self._source.take_codes(part) is None:
                    self._source.take(part)
                self._source.release()
