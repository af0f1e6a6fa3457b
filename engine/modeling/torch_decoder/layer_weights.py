"""The weights of a torch decoder's layers, and where the keys and values of each are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.description.spec import AttentionSpec
from engine.modeling.torch_decoder.latent import LatentWeights
from engine.modeling.torch_decoder.linear_attention import DeltaWeights
from engine.modeling.torch_decoder.projection import Projection
from kernels.interface import Kernels
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.experts.experts import ExpertWeights, Routing
from kernels.ops.linears.lora import LoraWeights


@dataclass(frozen=True, slots=True)
class NormWeight:
    weight: Tensor  # [hidden_size]
    bias: Tensor | None  # [hidden_size], of layer norms


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A feed-forward layer's: gate and up together where it is gated, else up alone."""

    gate_up: Projection  # [2 * inner or inner, hidden_size]
    down: Projection  # [hidden_size, inner]


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts'."""

    routing: Routing
    router: Projection  # [count, hidden_size], never quantised
    correction: Tensor | None  # [count]
    gate_up: ExpertWeights
    down: ExpertWeights
    shared_gate: Projection | None  # [1, hidden_size]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention's beside its projections.  It reads (num_heads + 2 num_kv_heads) * head_dim features of each token, and
    as many as it gives where it is gated; of latents, what queries are made of + rank + rotated."""

    heads: AttentionSpec
    head_norm: HeadNorm | None
    value_norm: Tensor | None  # [head_dim] ones, where values are normed
    latent: LatentWeights | None
    sinks: Tensor | None  # [num_heads] float32


class LayerCache(NamedTuple):
    """Where a layer's keys and values are."""

    cache: KVCache
    pool: int  # of those that a step's inputs name


@dataclass(frozen=True, slots=True)
class Adapted:
    """What the adapters of a step's tokens add to one layer's linears."""

    kernels: Kernels
    weights: Mapping[str, LoraWeights] | None = None  # by slot; None: no token has an adapter
    adapters: Tensor | None = None  # [num_tokens] int64

    def add(
        self,
        slot: str,
        x: Tensor,  # [num_tokens, in_features]
        y: Tensor,  # [num_tokens, out_features], changed
    ) -> Tensor:  # y
        if self.weights is None or self.adapters is None or slot not in self.weights:
            return y
        return self.kernels.lora(x, y, self.weights[slot], self.adapters)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; a norm that the layer does not have is None."""

    mixer: AttentionWeights | DeltaWeights
    input_norm: NormWeight | None
    qkv: Projection  # [what `mixer` reads, hidden_size]
    output: Projection  # [hidden_size, what `mixer` gives]
    attention_norm: NormWeight | None
    mlp_norm: NormWeight | None
    activation: str
    gated: bool
    dense: DenseWeights | None  # the shared expert where there is a mixture
    mixture: MixtureWeights | None
    mlp_output_norm: NormWeight | None
    scale: Tensor | None  # [1]
