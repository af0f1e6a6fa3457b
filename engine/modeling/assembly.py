"""From checkpoint tensors to the torch decoder: projections of the same input are joined, and packed for their op."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.modeling.config import ModelConfig
from engine.modeling.formats import Formats
from engine.modeling.kv_pool import KVLayout
from engine.modeling.kv_scales import KVScales
from engine.modeling.llama import Decoder, DecoderLayer, Projection
from engine.modeling.rope import build_rope_table
from engine.modeling.tensors import EMBEDDING, GATE_UP, HEAD, NORM, QUERY_KEY_VALUE, expected_tensors, layer_prefix
from engine.modeling.weights import WeightSource
from kernels.interface import Kernels
from kernels.ops.linear import LinearWeight
from kernels.ops.rotary_store import HeadNorm


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    formats: Formats,
    kernels: Kernels,
    device: torch.device,
    *,
    max_positions: int,
) -> Decoder:
    """A decoder for sequences of up to `max_positions` tokens.

    Torch multiplies fastest in the format that it computes in, so weights are held in that; only int8 stays int8.
    """
    reader = _Reader(config, source, formats, kernels, device)
    embedding = reader.matrix(EMBEDDING)
    head = kernels.pack_linear(embedding if config.tie_word_embeddings else reader.matrix(HEAD))
    norm = reader.vector(NORM)
    source.release()
    dtype = reader.dtype
    return Decoder(
        config=config,
        kernels=kernels,
        embedding=None if config.tie_word_embeddings and formats.quantised else embedding,
        layers=[reader.layer(index) for index in range(config.num_layers)],
        norm=norm,
        head=head,
        rope=build_rope_table(config.rope, config.head_dim, max_positions, dtype=dtype, device=device),
        layout=torch_layout(config, formats, device, source.kv_scales()),
    )


def torch_layout(
    config: ModelConfig, formats: Formats, device: torch.device, scales: tuple[KVScales, ...] = ()
) -> KVLayout:
    on_device = tuple(KVScales(*(column.to(device) for column in layer)) for layer in scales)
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, formats.kv, device, on_device)


class _Reader:
    """Takes tensors of one checkpoint and converts them."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, formats: Formats, kernels: Kernels, device: torch.device
    ) -> None:
        exact = device.type == "cpu" and formats.compute != torch.float16
        self.dtype = torch.float32 if exact else formats.compute
        self._held = self.dtype if formats.quantised else formats.weights
        self._config = config
        self._shapes: dict[str, tuple[int, ...]] = expected_tensors(config)
        self._source = source
        self._kernels = kernels
        self._device = device

    def matrix(self, name: str) -> Tensor:
        """Rounded to the format that weights are held in, in the one that they are computed with."""
        if self._device.type == "cpu":
            return self._rows(name)
        rounded = self._source.take(name).to(device=self._device, dtype=self._held, copy=True)
        return rounded.to(self.dtype)

    def _rows(self, *names: str) -> Tensor:
        """Matrices below each other, each copied once to its place."""
        shapes = [self._shapes[name] for name in names]
        joined = torch.empty((sum(rows for rows, _ in shapes), shapes[0][1]), dtype=self.dtype)
        for name, part in zip(names, torch.split(joined, [rows for rows, _ in shapes]), strict=True):
            self._source.copied(name, part, rounded=self._held)
        return joined

    def vector(self, name: str) -> Tensor:
        if self._device.type == "cpu":
            return self._source.copied(name, torch.empty(self._shapes[name], dtype=self.dtype))
        return self._source.take(name).to(device=self._device, dtype=self.dtype, copy=True)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, layer_prefix(index)
        qkv = self._join(prefix, QUERY_KEY_VALUE, bias=config.qkv_bias)
        layer = DecoderLayer(
            input_norm=self.vector(prefix + "input_layernorm.weight"),
            qkv=qkv,
            head_norm=self._head_norm(prefix) if config.qk_norm else None,
            output=self._join(prefix, ("self_attn.o_proj",), bias=config.output_bias),
            post_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            gate_up=self._join(prefix, GATE_UP, bias=config.mlp_bias),
            down=self._join(prefix, ("mlp.down_proj",), bias=config.mlp_bias),
            window=config.windows[index],
        )
        self._source.release()
        return layer

    def _head_norm(self, prefix: str) -> HeadNorm:
        query, key = (self.vector(f"{prefix}self_attn.{name}_norm.weight") for name in ("q", "k"))
        return HeadNorm(query, key, self._config.rms_norm_eps)

    def _join(self, prefix: str, names: tuple[str, ...], *, bias: bool) -> Projection:
        """Projections of the same input as one: [sum of out_features, in_features]."""
        weights = [f"{prefix}{name}.weight" for name in names]
        on_cpu = self._device.type == "cpu"
        joined = self._rows(*weights) if on_cpu else torch.cat([self.matrix(name) for name in weights])
        weight: LinearWeight = self._kernels.pack_linear(joined)
        if not bias:
            return Projection(weight, None)
        return Projection(weight, torch.cat([self.vector(f"{prefix}{name}.bias") for name in names]))
