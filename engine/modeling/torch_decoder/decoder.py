"""A described decoder in torch: one forward pass for all families, over the kernels of any provider.

A step's tokens of all sequences lie in one tensor, and pass the layers together; only attention knows which token
belongs to which sequence, from its metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.description.spec import ModelSpec
from engine.lora.adapter import LoraAdapter
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVLayout, KVPool, LayerPools, Sliding
from engine.modeling.rope import RopeTable, Rotation
from engine.modeling.torch_decoder.embedding import Embed
from engine.modeling.torch_decoder.inputs import PoolInputs, StepInputs, build_inputs
from engine.modeling.torch_decoder.layer_weights import (
    Adapted,
    AttentionWeights,
    DecoderLayer,
    DenseWeights,
    LayerCache,
    NormWeight,
)
from engine.modeling.torch_decoder.linear_attention import DeltaStates, DeltaWeights, attend_linearly, copy_rows
from engine.modeling.torch_decoder.stacked_lora import StackedAdapters
from kernels.interface import Kernels
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.steps.transfer import to_device


class Decoder:
    """Weights bound to the kernels that serve them: a `engine.modeling.model.Model`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        kernels: Kernels,
        embed: Embed,
        positions: Tensor | None,  # [max_position_embeddings, hidden_size], learned
        layers: Sequence[DecoderLayer],
        norm: NormWeight,
        head: LinearWeight,  # [vocab_size, hidden_size]
        ropes: Mapping[tuple[int, int], RopeTable],  # by the layers' rotations
        layout: KVLayout,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.layout = layout
        self._layers = tuple(layers)
        self.windows = self._windows_by_pool((0,) * len(spec.attentions), 1)  # of the layers of each pool
        self._embed_tokens = embed
        self._positions = positions
        self.norm = norm
        self.head = head
        self._ropes = dict(ropes)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), norm)
        self._memories: list[LayerCache | DeltaStates] = []  # one of each layer
        self._adapters: StackedAdapters | None = None

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def layer_bytes(self, block_size: int) -> list[int]:
        return self.layout.layer_bytes(block_size)

    @property
    def state_bytes(self) -> int:
        return self.spec.state_bytes(self.norm.weight.dtype.itemsize)

    def copy_states(
        self,
        sources: Ints,  # [n]
        destinations: Ints,  # [n], distinct
    ) -> None:
        held = (one for one in self._memories if isinstance(one, DeltaStates))
        copy_rows((tensor for one in held for tensor in (one.inputs, one.states)), sources, destinations)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        pools = LayerPools.of((heads.window for heads in self.spec.attentions), num_blocks, sliding)
        self.windows = self._windows_by_pool(pools.pools, len(pools.sizes))
        caches = self.layout.make_caches(pools.num_blocks, block_size)
        each, dtype = map(LayerCache, caches, pools.pools), self.norm.weight.dtype
        self._memories = [
            DeltaStates.make(layer.mixer.described, num_states, dtype, self.device)
            if isinstance(layer.mixer, DeltaWeights)
            else next(each)
            for layer in self._layers
        ]
        return pools.make(block_size, [cache.tensors for cache in caches])

    def _windows_by_pool(self, pools: Iterable[int], num_pools: int) -> list[tuple[int, ...]]:
        found: list[set[int]] = [set() for _ in range(num_pools)]
        for pool, heads in zip(pools, self.spec.attentions, strict=True):
            found[pool].add(heads.window)
        return [tuple(sorted(windows)) for windows in found]

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        self._adapters = StackedAdapters(count, max_rank, len(self._layers), self.norm.weight.dtype, self.device)

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        assert self._adapters is not None
        self._adapters.hold(place, adapter)

    def drop_adapter(self, place: int) -> None:
        assert self._adapters is not None
        self._adapters.drop(place)

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size]; writes this step's keys and values into the pool."""
        inputs = build_inputs(batch, self.kernels, self.windows, has_states=self.spec.has_states)
        return self.compute(inputs)[inputs.wanted]

    def compute(self, inputs: StepInputs) -> Tensor:
        """Final hidden states of all the step's tokens [num_tokens, hidden_size]; nothing here waits for the device."""
        return self._through(self._embed(inputs), inputs)

    def forward_captured(
        self, batch: StepBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # as of `forward`, and [num_tokens, number of layers * hidden_size]
        inputs = build_inputs(batch, self.kernels, self.windows, has_states=self.spec.has_states)
        captured: dict[int, Tensor] = {}
        hidden = self._through(self._embed(inputs), inputs, layers=layers, captured=captured)
        rows = torch.cat([captured[layer] for layer in layers], dim=1) if layers else hidden
        return hidden[inputs.wanted], rows[: int(batch.scheduled.sum())]

    def forward_from(
        self,
        batch: StepBatch,
        inputs: Tensor,  # [num_tokens, hidden_size]
        beside: Tensor | None,  # [num_tokens, 2 * hidden_size]
    ) -> Tensor:  # [sum of wanted, hidden_size]
        given = build_inputs(batch, self.kernels, self.windows)
        more = len(given.positions) - len(inputs)
        padded = (one if one is None else torch.nn.functional.pad(one, (0, 0, 0, more)) for one in (inputs, beside))
        residual, read = padded
        assert residual is not None
        return self._through(residual, given, beside=read, is_normed=False)[given.wanted]

    def _through(
        self,
        residual: Tensor,  # [num_tokens, hidden_size]
        inputs: StepInputs,
        *,
        beside: Tensor | None = None,  # [num_tokens, ...] what the first layer reads in the place of its normed input
        is_normed: bool = True,  # what comes back
        layers: Sequence[int] = (),
        captured: dict[int, Tensor] | None = None,  # gets what enters these layers
    ) -> Tensor:  # [num_tokens, hidden_size]
        rotations = {
            which: (table.cos[inputs.positions], table.sin[inputs.positions]) for which, table in self._ropes.items()
        }
        first = self._layers[0].input_norm
        hidden = beside if beside is not None else residual if first is None else self._normed(residual, first)
        next_norms = self._next_norms if is_normed else (*self._next_norms[:-1], None)
        columns = zip(self._layers, self._memories, next_norms, self._adapted(inputs), strict=True)
        for index, (layer, memory, next_norm, adapted) in enumerate(columns):
            if captured is not None and index in layers:
                captured[index] = residual.clone()
            mixed = self._mix(layer, hidden, rotations, inputs, memory, adapted)
            attended = adapted.add("output", mixed, layer.output(self.kernels, mixed))
            hidden, residual = self._add(attended, residual, layer.attention_norm, layer.mlp_norm)
            branch, output_norm = self._mlp(layer, hidden, adapted), layer.mlp_output_norm
            if layer.scale is not None:
                branch = branch if output_norm is None else self._normed(branch, output_norm)
                branch, residual, output_norm = branch * layer.scale, residual * layer.scale, None
            hidden, residual = self._add(branch, residual, output_norm, next_norm)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
        adapters: Ints | None = None,  # [num_rows] places of held ones, or -1
    ) -> Tensor:  # [num_rows, vocab_size] float32
        return self.logits_of(self.products(hidden, adapters))

    def logits_of(
        self,
        products: Tensor,  # [num_rows, vocab_size], with the head's weights
    ) -> Tensor:  # [num_rows, vocab_size] float32
        logits, cap = products.float(), self.spec.logit_softcap
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return torch.tanh(logits / cap) * cap if cap else logits

    def greedy(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
        adapters: Ints | None = None,  # [num_rows] places of held ones, or -1
    ) -> Tensor:  # [num_rows] int64
        if self.spec.logit_softcap:
            return self.kernels.sampling.argmax(self.logits(hidden, adapters))
        return self.kernels.sampling.argmax(self.products(hidden, adapters))

    def products(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
        adapters: Ints | None = None,  # [num_rows]
    ) -> Tensor:  # [num_rows, vocab_size]: as many as the head has
        products = self.kernels.linear(hidden, self.head, None)
        weights = None if self._adapters is None else self._adapters.head()
        if adapters is None or weights is None:
            return products
        return self.kernels.lora(hidden, products, weights, to_device(adapters, hidden.device))

    def _embed(self, inputs: StepInputs) -> Tensor:  # [num_tokens, hidden_size]
        hidden = self._embed_tokens(inputs.token_ids)
        if inputs.adapters is not None and self._adapters is not None:
            found = self._adapters.embedded(inputs.token_ids, inputs.adapters)
            hidden = hidden if found is None else self.kernels.lora(found[0], hidden, found[1], inputs.adapters)
        if self.spec.embed_scale != 1.0:
            hidden = hidden * self.spec.embed_scale
        return hidden if self._positions is None else hidden + self._positions[inputs.positions]

    def _normed(self, x: Tensor, norm: NormWeight) -> Tensor:
        if self.spec.norm.kind == "layer":
            return self.kernels.layer_norm(x, norm.weight, norm.bias, self.spec.norm.eps)
        return self.kernels.rms_norm(x, norm.weight, self.spec.norm.eps)

    def _add(
        self,
        branch: Tensor,  # [num_tokens, hidden_size]
        residual: Tensor,  # [num_tokens, hidden_size]
        output_norm: NormWeight | None,
        next_norm: NormWeight | None,
    ) -> tuple[Tensor, Tensor]:  # what the next branch reads, and the next residual
        if output_norm is not None:
            branch = self._normed(branch, output_norm)
        if self.spec.residual_scale != 1.0:
            branch = branch * self.spec.residual_scale
        if next_norm is not None and self.spec.norm.kind == "rms":
            return self.kernels.add_rms_norm(branch, residual, next_norm.weight, self.spec.norm.eps)
        total = branch + residual
        return total if next_norm is None else self._normed(total, next_norm), total

    def _mix(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        rotations: Mapping[tuple[int, int], Rotation],
        inputs: StepInputs,
        memory: LayerCache | DeltaStates,
        adapted: Adapted,
    ) -> Tensor:  # [num_tokens, in_features of the layer's output]
        mixed, mixer = adapted.add("qkv", hidden, layer.qkv(self.kernels, hidden)), layer.mixer
        if isinstance(mixer, AttentionWeights):
            assert isinstance(memory, LayerCache)
            rotation = rotations[mixer.heads.rotation]
            return self._attend(mixer, mixed, rotation, inputs.pools[memory.pool], memory.cache)
        assert isinstance(memory, DeltaStates)
        assert inputs.states is not None
        return attend_linearly(mixer, hidden, mixed, self.kernels, memory, inputs.states)

    def _attend(
        self,
        mixer: AttentionWeights,
        mixed: Tensor,  # [num_tokens, what it reads]
        rotation: Rotation,
        inputs: PoolInputs,
        cache: KVCache,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim, or of the values that are made of latents]
        heads, head_norm, num_vectors = (
            mixer.heads,
            mixer.head_norm,
            mixer.heads.num_heads + 2 * mixer.heads.num_kv_heads,
        )
        if mixer.latent is not None:
            return mixer.latent.attend(self.kernels, heads, mixed, rotation, inputs, cache)
        gate = mixed[:, num_vectors * heads.head_dim :]
        if head_norm is not None and heads.qk_norm == "whole":
            mixed, head_norm = self._norm_whole(mixed, head_norm), None
        mixed = mixed.view(len(mixed), -1, heads.head_dim)
        if heads.gated:
            mixed = mixed[:, :num_vectors]
        if mixer.value_norm is not None:
            values = mixed[:, -heads.num_kv_heads :]
            values.copy_(self.kernels.rms_norm(values.contiguous(), mixer.value_norm, self.spec.norm.eps))
        query = self.kernels.rotary_store(mixed, *rotation, head_norm, cache, inputs.slot_mapping)
        attended = self.kernels.paged_attention(
            query, cache, inputs.attention, heads.score_scale, heads.window, heads.softcap, mixer.sinks
        )
        attended = attended.flatten(1)
        return self.kernels.gated_activation(torch.cat((gate, attended), dim=1), "sigmoid") if heads.gated else attended

    def _norm_whole(
        self,
        mixed: Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]
        norm: HeadNorm,  # of all heads together
    ) -> Tensor:
        queries, keys = len(norm.query), len(norm.key)
        query, key, value = mixed.tensor_split((queries, queries + keys), dim=1)
        normed = (
            self.kernels.rms_norm(part.contiguous(), weight, norm.eps)
            for part, weight in ((query, norm.query), (key, norm.key))
        )
        return torch.cat((*normed, value), dim=1)

    def _mlp(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        adapted: Adapted,
    ) -> Tensor:  # [num_tokens, hidden_size]
        shared = None if layer.dense is None else self._feed_forward(layer, layer.dense, hidden, adapted)
        if layer.mixture is None:
            assert shared is not None
            return shared
        mixture = layer.mixture
        scores = self.kernels.exact_linear(hidden, mixture.router.weight, mixture.router.bias).float()
        weights, ids = self.kernels.route(scores, mixture.routing, mixture.correction)
        mixed = self.kernels.experts(hidden, ids, weights, mixture.gate_up, mixture.down, layer.activation, layer.gated)
        if shared is None:
            return mixed
        if mixture.shared_gate is not None:
            gate = self.kernels.exact_linear(hidden, mixture.shared_gate.weight, None)
            shared = self.kernels.activation(gate, "sigmoid") * shared
        return mixed + shared

    def _feed_forward(
        self,
        layer: DecoderLayer,
        weights: DenseWeights,
        hidden: Tensor,  # [num_tokens, hidden_size]
        adapted: Adapted,
    ) -> Tensor:  # [num_tokens, hidden_size]
        inner = adapted.add("gate_up", hidden, weights.gate_up(self.kernels, hidden))
        activate = self.kernels.gated_activation if layer.gated else self.kernels.activation
        inner = activate(inner, layer.activation)
        return adapted.add("down", inner, weights.down(self.kernels, inner))

    def _adapted(self, inputs: StepInputs) -> list[Adapted]:
        if inputs.adapters is None or self._adapters is None:
            return [Adapted(self.kernels)] * len(self._layers)
        return [Adapted(self.kernels, weights, inputs.adapters) for weights in self._adapters.layers]
