"""How a model is cut for a pipeline: each stage has some of its layers, one behind the other.

No layer is cut, and what passes from a stage to the next is what passes from a layer to the next, so a pipeline
computes what one process does, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.description.names import TensorMap
from engine.description.ranks import Place
from engine.description.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one rank.  Rank 1 begins, and rank 0, which leads, ends: it has the head, and samples."""

    number: int
    count: int

    @classmethod
    def of(cls, place: Place) -> Stage:
        return cls((place.rank - 1) % place.ranks, place.ranks)

    @property
    def begins(self) -> bool:
        return self.number == 0

    @property
    def ends(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> slice:
        """As many as the other stages', or one more: the first stages have these, as the last one has the head."""
        each, more = divmod(num_layers, self.count)
        first, after = (each * number + min(number, more) for number in (self.number, self.number + 1))
        return slice(first, after)

    def cut_spec(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, layers=spec.layers[self.layers(spec.num_layers)])

    def cut_tensors(self, tensors: TensorMap) -> TensorMap:
        """With the stage's layers; what stands before and behind all layers stays."""
        return replace(tensors, layers=tensors.layers[self.layers(len(tensors.layers))])


def why_not_staged(spec: ModelSpec, stages: int) -> str:
    """What keeps a model from so many stages; empty where nothing does."""
    if spec.has_states:
        return "layers of linear attention are not divided into stages"
    if stages > spec.num_layers:
        return f"pipeline_parallel_size is {stages}, but the model has {spec.num_layers} layers: a stage needs one"
    return ""
