"""The decoder of the Llama family in native code: a step is one call, which gets pointers and no copies.

It owns the packed weights, in one stretch of memory, and the KV pool, whose layout is the library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.modeling.batch import Ints, StepBatch
from engine.modeling.config import ModelConfig
from engine.modeling.formats import Formats
from engine.modeling.kv_pool import KVPool
from engine.modeling.pages import Arena, padded
from engine.modeling.rope import build_rope_table
from engine.modeling.tensors import EMBEDDING, GATE_UP, HEAD, NORM, QUERY_KEY_VALUE, layer_prefix
from engine.modeling.weights import WeightSource
from kernels.cpu import abi
from kernels.cpu.native import FORMATS, KVShape, Native, PackedLinear, StepColumns


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """The KV pool's layout: opaque blocks of bytes, of keys and of values."""

    native: Native
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        return self.num_layers * sum(self._sizes(block_size))

    def make_blocks(self, num_blocks: int, block_size: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, keys and values [num_blocks, bytes] uint8."""
        sizes = self._sizes(block_size)
        arena = Arena(self.num_layers * sum(padded(num_blocks * size) for size in sizes))
        made = [
            [arena.take(num_blocks * size).view(num_blocks, size) for size in sizes] for _ in range(self.num_layers)
        ]
        return [(keys, values) for keys, values in made]

    def _sizes(self, block_size: int) -> tuple[int, int]:
        shape = KVShape(self.dtype, block_size, self.num_kv_heads, self.head_dim)
        return self.native.key_bytes(shape), self.native.value_bytes(shape)


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer's weights, packed."""

    input_norm: Tensor  # [hidden_size] float32
    qkv: PackedLinear  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    query_norm: Tensor | None  # [head_dim] float32
    key_norm: Tensor | None  # [head_dim] float32
    output: PackedLinear  # [hidden_size, num_heads * head_dim]
    post_norm: Tensor  # [hidden_size] float32
    gate_up: PackedLinear  # [2 * intermediate_size, hidden_size]
    down: PackedLinear  # [hidden_size, intermediate_size]
    window: int  # tokens that a query sees, itself included; 0: all

    def struct(self, keys: Tensor, values: Tensor, rotation: tuple[Tensor, Tensor]) -> abi.PgLayer:
        cos, sin = rotation
        return abi.PgLayer(
            input_norm=_norm(self.input_norm),
            mlp_norm=_norm(self.post_norm),
            query_norm=_norm(self.query_norm),
            key_norm=_norm(self.key_norm),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            inner=self.down.k,
            gated=1,
            activation=abi.SILU,
            qkv=self.qkv.struct,
            output=self.output.struct,
            gate_up=self.gate_up.struct,
            down=self.down.struct,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            window=self.window,
        )


class NativeDecoder:
    """A `engine.modeling.model.Model`.  The structures that the library reads point into tensors held here."""

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        config: ModelConfig,
        native: Native,
        formats: Formats,
        embedding: Tensor | None,  # [vocab_size, hidden_size] float32 or bfloat16; None: the head's rows
        layers: list[NativeLayer],
        norm: Tensor,  # [hidden_size] float32
        head: PackedLinear,  # [vocab_size, hidden_size]
        rotation: tuple[Tensor, Tensor],  # cos and sin, each [max_positions, head_dim / 2] float32
    ) -> None:
        self.config = config
        self.layout = native_layout(config, native, formats)
        self._native = native
        self._held = (embedding, norm, head)
        self._layers, self._rotation = layers, rotation
        self._pool: KVPool | None = None
        self._logits = torch.empty(0)
        self._columns: StepColumns | None = None
        self._model = describe(config, formats)
        self._model.max_positions = len(rotation[0])
        self._model.norm, self._model.head = _norm(norm), head.struct
        if embedding is not None:
            self._model.embedding, self._model.embedding_format = embedding.data_ptr(), FORMATS[embedding.dtype]

    def bytes_per_block(self, block_size: int) -> int:
        return self.layout.bytes_per_block(block_size)

    def allocate(self, num_blocks: int, block_size: int) -> KVPool:
        blocks = self.layout.make_blocks(num_blocks, block_size)
        structs = [layer.struct(*both, self._rotation) for layer, both in zip(self._layers, blocks, strict=True)]
        self._model.block_size = block_size
        self._model.layers = (abi.PgLayer * len(structs))(*structs)
        self._pool = KVPool(num_blocks, block_size, (tensor for both in blocks for tensor in both))
        return self._pool

    def forward(self, batch: StepBatch) -> Tensor:
        hidden = torch.empty(batch.num_wanted, self.config.hidden_size)
        self._native.forward(self._model, self._step(batch), hidden)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
    ) -> Tensor:  # [n, vocab_size] float32: memory that is used again by the next call
        if len(self._logits) < len(hidden):
            self._logits = torch.empty(len(hidden), self.config.vocab_size)
        logits = self._logits[: len(hidden)]
        self._native.logits(self._model, hidden, logits)
        return logits

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
    ) -> Tensor:  # [n] int64
        return self._native.greedy(self._model, hidden)

    def extend(
        self,
        batch: StepBatch,
        count: int,
        temperature: NDArray[np.float64],  # [num_seqs]; 0: the most likely token
        seeds: Ints,  # [num_seqs]
    ) -> Ints:  # [count, num_seqs]
        """As many tokens of every sequence, one after the other; `batch` wants one of each, and its tables have room.

        They are what a sampler takes of rows that have nothing but a temperature and a seed; they stand in the batch's
        `tokens` then.
        """
        return self._native.extend(self._model, self._step(batch), count, temperature.astype(np.float32), seeds)

    def _step(self, batch: StepBatch) -> abi.PgStep:
        columns = self._columns
        if columns is None or columns.tokens is not batch.tokens or columns.tables is not batch.block_tables:
            columns = self._columns = StepColumns(batch.tokens, batch.block_tables)
        return columns.fill(batch.rows, batch.computed, batch.scheduled, batch.wanted)


def native_layout(config: ModelConfig, native: Native, formats: Formats) -> NativeLayout:
    return NativeLayout(native, config.num_layers, config.num_kv_heads, config.head_dim, formats.kv)


def why_unsupported(config: ModelConfig, native: Native, formats: Formats, block_size: int) -> str:
    """What keeps the native kernels from this model; empty where nothing does."""
    if formats.kv not in FORMATS or formats.weights not in FORMATS:
        return f"they do not compute in {formats}"
    model = describe(config, formats)
    model.block_size = block_size
    model.layers = (abi.PgLayer * config.num_layers)(*[abi.PgLayer(inner=config.intermediate_size)] * config.num_layers)
    return native.why_unsupported(model)


def describe(config: ModelConfig, formats: Formats) -> abi.PgModel:
    """The dimensions, without any memory."""
    return abi.PgModel(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        kv_format=FORMATS[formats.kv],
        round_activations=formats.rounds,
        eps=config.rms_norm_eps,
        embed_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
    )


def build_native(
    config: ModelConfig, source: WeightSource, formats: Formats, native: Native, *, max_positions: int
) -> NativeDecoder:
    """A decoder for sequences of up to `max_positions` tokens, packed layer by layer straight from the checkpoint."""
    packer = _Packer(config, source, formats, native)
    head, embedding = packer.ends()
    table = build_rope_table(
        config.rope, config.head_dim, max_positions, dtype=torch.float32, device=NativeDecoder.device
    )
    half = config.head_dim // 2
    return NativeDecoder(
        config=config,
        native=native,
        formats=formats,
        embedding=embedding,
        layers=[packer.layer(index) for index in range(config.num_layers)],
        norm=packer.norm(),
        head=head,
        rotation=(table.cos[:, 0, :half].contiguous(), table.sin[:, 0, half:].contiguous()),
    )


class _Packer:
    """Takes tensors of one checkpoint and packs them, one after the other, into one arena."""

    def __init__(self, config: ModelConfig, source: WeightSource, formats: Formats, native: Native) -> None:
        self._config = config
        self._source = source
        self._dtype = formats.weights
        self._native = native
        self._arena = Arena(self._total())

    def ends(self) -> tuple[PackedLinear, Tensor | None]:
        """The head, and the embedding where it is not the same."""
        config, embedding = self._config, None
        if not config.tie_word_embeddings:
            stored = self._source.take(EMBEDDING)
            held = torch.bfloat16 if torch.bfloat16 in (stored.dtype, self._dtype) else torch.float32
            embedding = self._native.copy(
                stored, torch.empty(stored.shape, dtype=held), next(iter(self._source.sums(EMBEDDING)), None)
            )
            self._source.release()
        head = self._pack((EMBEDDING if embedding is None else HEAD,))
        self._source.release()
        return head, embedding

    def norm(self) -> Tensor:
        norm = self._vector(NORM)
        self._source.release()
        return norm

    def layer(self, index: int) -> NativeLayer:
        config, prefix = self._config, layer_prefix(index)
        query_norm, key_norm = (
            self._vector(f"{prefix}self_attn.{name}_norm.weight") if config.qk_norm else None for name in ("q", "k")
        )
        layer = NativeLayer(
            input_norm=self._vector(prefix + "input_layernorm.weight"),
            qkv=self._projection(prefix, QUERY_KEY_VALUE, config.qkv_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._projection(prefix, ("self_attn.o_proj",), config.output_bias),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight"),
            gate_up=self._gate_up(prefix),
            down=self._projection(prefix, ("mlp.down_proj",), config.mlp_bias),
            window=config.windows[index],
        )
        self._source.release()
        return layer

    def _projection(self, prefix: str, names: tuple[str, ...], bias: bool) -> PackedLinear:
        """Projections of the same input as one: [sum of out_features, in_features]."""
        return self._pack([f"{prefix}{name}.weight" for name in names], self._biases(prefix, names, bias))

    def _gate_up(self, prefix: str) -> PackedLinear:
        names = [f"{prefix}{name}.weight" for name in GATE_UP]
        gate, up = (self._source.take(name) for name in names)
        bias = self._biases(prefix, GATE_UP, self._config.mlp_bias)
        packed = self._arena.take(self._native.packed_bytes(2 * len(gate), gate.shape[1], self._dtype))
        by_turns = None if bias is None else bias.view(2, -1)
        return self._native.pack_gate_up(gate, up, self._dtype, packed, by_turns, sums=self._source.sums(*names))

    def _pack(
        self,
        names: Sequence[str],  # of parts [..., k] of a weight [n, k]
        bias: Tensor | None = None,  # [n] float32
    ) -> PackedLinear:
        parts = [self._source.take(name) for name in names]
        packed = self._arena.take(self._native.packed_bytes(sum(map(len, parts)), parts[0].shape[1], self._dtype))
        return self._native.pack_linear(parts, self._dtype, packed, bias, sums=self._source.sums(*names))

    def _vector(self, name: str) -> Tensor:
        return self._source.take(name).to(torch.float32, copy=True)

    def _biases(self, prefix: str, names: tuple[str, ...], given: bool) -> Tensor | None:
        return torch.cat([self._vector(f"{prefix}{name}.bias") for name in names]) if given else None

    def _total(self) -> int:
        """Bytes of all packed weights."""
        config = self._config
        attended = config.num_heads * config.head_dim
        shapes = [
            (attended + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
            (config.hidden_size, attended),
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        ] * config.num_layers
        shapes.append((config.vocab_size, config.hidden_size))
        return sum(padded(self._native.packed_bytes(n, k, self._dtype)) for n, k in shapes)


def _norm(weight: Tensor | None) -> abi.PgNorm:
    return abi.PgNorm(None if weight is None else weight.data_ptr(), None, abi.RMS_NORM)
