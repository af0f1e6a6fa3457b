"""How a model is cut for a pipeline: each stage has some of its layers, one behind the other.

No layer is cut, and what passes from a stage to the next is what passes from a layer to the next, so a pipeline
computes what one process does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.description.names import TensorMap
from engine.description.ranks import Place, why_not_cut
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one rank.  Rank 1 begins, and rank 0, which leads, ends: it has the head, and samples."""

    layers: slice
    begins: bool
    ends: bool

    @classmethod
    def of(cls, place: Place, spec: ModelSpec) -> Stage:
        number = (place.rank - 1) % place.ranks
        bounds = divide_layers([layer_weights(spec, layer) for layer in spec.layers], head_weights(spec), place.ranks)
        return cls(slice(*bounds[number : number + 2]), begins=number == 0, ends=place.leads)

    def cut_spec(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, layers=spec.layers[self.layers])

    def cut_tensors(self, tensors: TensorMap) -> TensorMap:
        """With the stage's layers; what stands before and behind all layers stays."""
        return replace(tensors, layers=tensors.layers[self.layers])


def divide_layers(weights: Sequence[int], head: int, stages: int) -> list[int]:
    """Where stages begin, and the end: each reads about as many weights in a step, and has a layer."""
    sums, count = [0, *accumulate(weights)], len(weights)
    bounds = [0]
    for stage in range(1, stages):
        wanted = stage * (sums[-1] + head) / stages
        nearest = min(range(count + 1), key=lambda place: abs(sums[place] - wanted))
        bounds.append(min(max(nearest, bounds[-1] + 1), count - stages + stage))
    return [*bounds, count]


def layer_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """About as many as its linears have."""
    heads, mlp = layer.attention, layer.mlp
    features = 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim if isinstance(heads, AttentionSpec) else 0
    inner = mlp.inner + (mlp.experts.count * mlp.experts.inner if mlp.experts else 0)
    return spec.hidden_size * (features + (3 if mlp.gated else 2) * inner)


def head_weights(spec: ModelSpec) -> int:
    return spec.hidden_size * spec.vocab_size


def why_not_divided(
    spec: ModelSpec, stages: int, ranks: int, *, whole_experts: bool = False, redundant: int = 0
) -> str:
    """What keeps a model from so many stages, each of so many ranks; empty where nothing does."""
    why = why_not_staged(spec, stages) if stages > 1 else ""
    if why or ranks == 1:
        return why
    return why_not_cut(spec, ranks, whole_experts=whole_experts, redundant=redundant)


def why_not_staged(spec: ModelSpec, stages: int) -> str:
    """What keeps a model from so many stages; empty where nothing does."""
    if spec.has_states:
        return "layers of linear attention are not divided into stages"
    if stages > spec.num_layers:
        return f"pipeline_parallel_size is {stages}, but the model has {spec.num_layers} layers: a stage needs one"
    return ""
