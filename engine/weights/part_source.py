"""What one process of several has of a checkpoint: a rank some of each layer, a stage some of the layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.description.names import Part, TensorMap
from engine.description.ranks import Place, cut_tensors
from engine.description.spec import ModelSpec
from engine.description.stages import Stage
from engine.weights.digest import WeightDigest
from engine.weights.inventory import QuantisedMatrix
from engine.weights.kv_scales import KVScales
from engine.weights.quantised.form import Quantisation
from engine.weights.quantised.kept import QuantisedAs
from engine.weights.source import WeightSource
from kernels.ops.digest import Sums
from kernels.ops.linears.codes import Codes
from shared.errors import ConfigError


class PartSource:
    """A `WeightSource` of a part of another one.  The digest is that of the whole, which all processes compare."""

    def __init__(self, source: WeightSource, tensors: TensorMap) -> None:
        self.dtype: torch.dtype = source.dtype
        self.tensors = tensors
        self._source = source
        self._read: set[str] = set()  # names of the tensors that the digest has, or will have

    def take(self, part: Part) -> Tensor:
        self._read.add(part.name)
        return self._source.take(part)

    def copied(self, part: Part, out: Tensor, *, rounded: torch.dtype | None = None) -> Tensor:
        self._read.add(part.name)
        return self._source.copied(part, out, rounded=rounded)

    def sums(self, *parts: Part) -> Sums | None:
        return self._source.sums(*parts)

    def take_codes(self, part: Part) -> Codes | None:
        self._read.add(part.name)
        return self._source.take_codes(part)

    def quantised_as(self, part: Part) -> QuantisedMatrix | None:
        return self._source.quantised_as(part)

    @property
    def quantisation(self) -> Quantisation | None:
        return self._source.quantisation

    def kv_scales(self) -> tuple[KVScales, ...]:
        return self._source.kv_scales()

    @property
    def files(self) -> list[Path]:
        return self._source.files

    def watch(self, digest: WeightDigest) -> None:
        self._source.watch(digest)

    def release(self) -> None:
        self._source.release()

    def read_others(self) -> None:
        """What this process has no part of, for the digest."""
        for part in self._source.tensors.parts():
            if part.name not in self._read:
                self._read.add(part.name)
                if self._source.take_codes(part) is None:
                    self._source.take(part)
                self._source.release()


class RankSource(PartSource):
    """What a rank has."""

    def __init__(self, source: WeightSource, spec: ModelSpec, place: Place) -> None:
        """With the whole model's description.  Raises ConfigError where experts that stay whole are not alike."""
        if place.whole_experts and (why := _why_not_whole(spec, source.tensors, source.quantised_as)):
            raise ConfigError(why)
        super().__init__(source, cut_tensors(spec, source.tensors, place))
        self._read = {part.name for part in self.tensors.parts()}
        self._heads = [place.share(one.num_kv_heads) for one in spec.attentions]

    def kv_scales(self) -> tuple[KVScales, ...]:
        both = zip(super().kv_scales(), self._heads, strict=False)
        return tuple(KVScales(scales.keys[heads], scales.values[heads]) for scales, heads in both)


class StageSource(PartSource):
    """What a stage has; of what stands before and behind all layers only what it takes."""

    def __init__(self, source: WeightSource, stage: Stage) -> None:
        super().__init__(source, stage.cut_tensors(source.tensors))
        self._layers = stage.layers

    def kv_scales(self) -> tuple[KVScales, ...]:
        return super().kv_scales()[self._layers]


def _why_not_whole(spec: ModelSpec, tensors: TensorMap, quantised_as: QuantisedAs) -> str:
    """What keeps ranks from having experts whole: in which order their outputs are added depends on how all of a layer
    are multiplied, which a rank sees of its own alone.  Empty where nothing does."""
    for index, (layer, parts) in enumerate(zip(spec.layers, tensors.layers, strict=True)):
        if layer.mlp.experts is None:
            continue
        for slot in ("experts_gate_up", "experts_down"):
            found = {_stored_as(quantised_as(part)) for part in parts[slot]}
            if len(found) > 1:
                return f"enable_expert_parallel is set, but layer {index} has experts in several stored formats"
    return ""


def _stored_as(found: QuantisedMatrix | None) -> tuple[object, ...]:
    codes = None if found is None else found.codes
    return () if codes is None else (codes.bits, codes.group, codes.symmetric, codes.is_float)
