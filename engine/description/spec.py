"""The description of a decoder that all executors run.  Lengths in tokens; a `scale` multiplies.

A layer is, with absent norms left out, and `attention` either attention over a cache or linear attention over a state:

    x = x + residual_scale * attention_norm(attention(input_norm(x)))
    x = x + residual_scale * mlp_output_norm(mlp(mlp_norm(x)))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.description.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
LabelActivation = Literal["softmax", "sigmoid", "none"]
NO_ROPE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Of the whole model.  Weights that a checkpoint stores as what is added to one are made whole at load."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention: the cache holds one normed vector of each token, of which keys and values are linear maps.

    A head's query is `plain` features, which meet the latent through the map of its keys, and `rotated` features,
    which meet as many that the token keeps beside its latent, the same for all heads.
    """

    rank: int  # features of a latent
    rotated: int
    plain: int
    value_dim: int  # features of a head's values
    query_rank: int = 0  # features of a normed vector that queries are made of; 0: of the hidden state
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention with a paged cache.  Where it is latent, one KV head of `rank` + `rotated` features."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentSpec | None = None
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    window: int = 0  # tokens that a query sees, itself included; 0: every earlier token
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay
    sinks: bool = False  # one learned logit of each head is a further term of its softmax, with no value
    qk_norm: Literal["", "head", "whole"] = ""  # of each head's queries and keys, or of all heads together
    value_norm: bool = False  # each head's values are divided by the root of their mean square
    keys_are_values: bool = False  # one projection gives both, before norms and rotation
    rope: int = 0  # index of ModelSpec.ropes, or NO_ROPE
    qkv_bias: bool = False
    output_bias: bool = False
    gated: bool = False  # the sigmoid of a linear of the layer's input scales what attention gives, feature by feature

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cached_vectors(self) -> int:
        """Of `head_dim` features, that the cache holds of one token."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def rotation(self) -> tuple[int, int]:
        """Which rope turns how many dimensions: what a table of cosines depends on."""
        return self.rope, self.latent.rotated if self.latent else self.head_dim


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

    @property
    def num_state_values(self) -> int:
        """Of one sequence."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def num_held_inputs(self) -> int:
        """Of one sequence's convolution."""
        return (self.conv_width - 1) * self.channels


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
    group_best: int = 2  # a group is as good as its best, or its two best, together
    scale: float = 1.0  # of the weights
    router_bias: bool = False
    correction: bool = False  # a bias that counts for the choice alone
    bias: bool = False  # of the experts' linears
    shared_gate: bool = False  # the sigmoid of a linear scales the shared expert
    holders: tuple[int, ...] = field(default=(), repr=False)  # of each expert, a bit for each rank that has it whole
    held: tuple[int, ...] = field(default=(), repr=False)  # experts that this rank has whole; none: all, or their parts

    @property
    def num_held(self) -> int:
        return len(self.held) or self.count


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
    scaled: bool = False  # what leaves the layer is multiplied by a number of the checkpoint


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
    labels: tuple[str, ...] = ()  # of a classifier of whole texts, which stands in the place of the head
    label_activation: LabelActivation = "softmax"  # what makes their logits scores
    unused_layers: int = 0  # that a checkpoint may have behind the others, to propose drafts with

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have a cache, in their order: layers of linear attention have no place among them."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, AttentionSpec))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of each sequence, which unlike a cache cannot be cut back or shared."""
        return len(self.attentions) < len(self.layers)

    def state_bytes(self, input_bytes: int) -> int:
        """Of one sequence's states in all layers; a convolution's input has so many bytes, a state is float32."""
        deltas = (layer.attention for layer in self.layers if isinstance(layer.attention, DeltaNetSpec))
        return sum(4 * one.num_state_values + input_bytes * one.num_held_inputs for one in deltas)

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """Query heads that share a KV head, and dimensions: each pair that a layer with a cache has."""
        return tuple(dict.fromkeys((one.group, one.head_dim) for one in self.attentions))

    def windows(self, max_model_len: int) -> tuple[int, ...]:
        """The windows that are shorter than sequences of up to so many tokens, the smallest first."""
        found = {one.window for one in self.attentions}
        return tuple(sorted(window for window in found if 0 < window < max_model_len))

    @property
    def longest_model_len(self) -> int:
        """Tokens that the position embedding can address, with rope scaling."""
        positions = self.max_position_embeddings
        if self.learned_positions:
            return positions
        return max([positions, *(rope.reach(positions) for rope in self.ropes)])
