"""The description of a decoder that all executors run.  Lengths in tokens; a `scale` multiplies.

A layer is, with absent norms left out, and `attention` either attention over a cache or linear attention over a state:

    x = x + residual_scale * attention_norm(attention(input_norm(x)))
    x = x + residual_scale * mlp_output_norm(mlp(mlp_norm(x)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.description.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
NO_ROPE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Of the whole model.  Weights that a checkpoint stores as what is added to one are made whole at load."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention with a paged cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    window: int = 0  # tokens that a query sees, itself included; 0: every earlier token
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay
    sinks: bool = False  # one learned logit of each head is a further term of its softmax, with no value
    qk_norm: Literal["", "head", "whole"] = ""  # of each head's queries and keys, or of all heads together
    rope: int = 0  # index of ModelSpec.ropes, or NO_ROPE
    qkv_bias: bool = False
    output_bias: bool = False
    gated: bool = False  # the sigmoid of a linear of the layer's input scales what attention gives, feature by feature

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Linear attention by the gated delta rule, behind a short convolution; its memory is a state of fixed size.

    A norm of each head's result, and a gate, stand before the output.
    """

    key_heads: int  # each shared by value_heads / key_heads neighbours
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # tokens that the convolution sees, its own included

    @property
    def key_features(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Features that are convolved: queries, keys, values."""
        return 2 * self.key_features + self.value_features


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of feed-forward experts, of which each token takes `top_k`."""

    count: int
    top_k: int
    inner: int  # features of each expert
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    renormalise: bool = True  # weights of the chosen are divided by their sum
    groups: int = 1  # experts stand in as many groups, of which the best `kept_groups` are looked at
    kept_groups: int = 1
    scale: float = 1.0  # of the weights
    router_bias: bool = False
    correction: bool = False  # a bias that counts for the choice alone
    bias: bool = False  # of the experts' linears
    shared_gate: bool = False  # the sigmoid of a linear scales the shared expert


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Dense where there are no experts; where there are, `inner` is the shared expert's, 0 without one."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec | DeltaNetSpec
    mlp: MlpSpec
    input_norm: bool = True
    attention_norm: bool = False  # of the attention's output
    mlp_norm: bool = True
    mlp_output_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that a config.json says of a decoder's arithmetic."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    ropes: tuple[RopeConfig, ...]  # empty: no layer rotates
    max_position_embeddings: int
    learned_positions: bool = False  # a table that is added to the embedding
    tie_word_embeddings: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: logits stay
    dtype: str = ""  # of the checkpoint; empty where it does not say
    initializer_range: float = 0.02  # of made-up weights

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> AttentionSpec:
        """Of any layer with a cache: in every family that is served, all of them have heads of one number and size."""
        return self.attentions[0]

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have a cache."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, AttentionSpec))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of each sequence, which unlike a cache cannot be cut back or shared."""
        return len(self.attentions) < len(self.layers)

    @property
    def longest_model_len(self) -> int:
        """Tokens that the position embedding can address, with rope scaling."""
        positions = self.max_position_embeddings
        if self.learned_positions:
            return positions
        return max([positions, *(rope.reach(positions) for rope in self.ropes)])
