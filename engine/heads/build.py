"""A draft head in the executor that runs its target: weights in the target's formats, packed for the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.description.draft_head import HeadSpec
from engine.description.names import LayerParts
from engine.description.spec import NO_ROPE
from engine.heads.model import AroundWeights, HeadModel
from engine.heads.native import NativeHead, readable
from engine.heads.source import HeadSource
from engine.modeling.native.decoder import NativeDecoder, make_rotation
from engine.modeling.native.layers import LayerPacker
from engine.modeling.rope import build_rope_table
from engine.modeling.torch_decoder.assembly import DecoderReader, torch_layout
from engine.modeling.torch_decoder.decoder import Decoder
from engine.modeling.torch_decoder.embedding import StoredRows
from engine.weights.formats import Formats
from engine.weights.pages import Arena, padded
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear
from kernels.interface import Kernels

VECTORS = ("capture_norm", "embedding_norm", "hidden_norm", "norm")


def head_formats(formats: Formats) -> Formats:
    """Those of the target, but that the weights are in int8 unless the target's are in 32 bits.  A draft costs what its
    weights are to read, and of the drafts of 8 bits as many are accepted; 4 bits cost some."""
    weights = formats.weights if formats.weights == torch.float32 else torch.int8
    return replace(formats, weights=weights, head=None, group=0, keeps_codes=False)


def build_native_head(
    spec: HeadSpec,
    source: HeadSource,
    target: NativeDecoder,
    embedding: Tensor,  # [vocab_size, hidden_size]
    ids: Tensor | None,
    *,
    formats: Formats,
    native: Native,
    max_positions: int,
) -> HeadModel:
    formats, described = head_formats(formats), spec.layers
    packer = LayerPacker(described, source, formats, native)
    tables = {which: make_rotation(described, *which, max_positions) for which in _rotations(spec)}
    layers = NativeDecoder(
        spec=described,
        native=native,
        formats=formats,
        embedding=None,
        positions=None,
        layers=[
            packer.layer(layer, parts, tables[heads.rotation])
            for layer, heads, parts in zip(described.layers, described.attentions, source.tensors.layers, strict=True)
        ],
        norm=None,
        head=packer.head((source.tensors.head,)) if source.tensors.head is not None else target.head,
        max_positions=max_positions,
    )
    around = source.head.around
    packed = {slot: _packed_linear(slot, around, source, formats, native) for slot in _linears(around)}
    linears = {
        slot: partial(_multiply, native=native, weight=one, rounds=formats.rounds) for slot, one in packed.items()
    }
    norms = _norms(around, source, torch.float32, target.device)
    weights = AroundWeights(linears, norms, readable(embedding), ids)
    source.release()
    return NativeHead(spec, layers, weights, packed, native)


def _packed_linear(slot: str, around: LayerParts, source: HeadSource, formats: Formats, native: Native) -> PackedLinear:
    taken = [source.take(part) for part in around[slot]]
    size = native.packed_bytes(sum(map(len, taken)), taken[0].shape[1], formats.weights)
    bias = [source.take(part).float() for part in around.get(f"{slot}.bias", ())]
    return native.pack_linear(taken, formats.weights, Arena(padded(size)).take(size), torch.cat(bias) if bias else None)


def _multiply(x: Tensor, *, native: Native, weight: PackedLinear, rounds: bool) -> Tensor:
    return native.linear(x.contiguous(), weight, rounds=rounds)


def build_torch_head(
    spec: HeadSpec,
    source: HeadSource,
    target: Decoder,
    embedding: Tensor,  # [vocab_size, hidden_size]
    ids: Tensor | None,
    *,
    formats: Formats,
    kernels: Kernels,
    max_positions: int,
) -> HeadModel:
    described, device = spec.layers, target.device
    reader = DecoderReader(described, source, formats, kernels, device)
    norm = reader.norm("norm", source.head.around) or target.norm
    head = source.tensors.head
    layers = Decoder(
        spec=described,
        kernels=kernels,
        embed=StoredRows(embedding),
        positions=None,
        layers=[
            reader.layer(layer, parts) for layer, parts in zip(described.layers, source.tensors.layers, strict=True)
        ],
        norm=norm,
        head=target.head if head is None else kernels.pack_output(reader.matrix((head,))),
        ropes={
            (index, dims): build_rope_table(
                None if index == NO_ROPE else described.ropes[index],
                dims,
                max_positions,
                dtype=reader.dtype,
                device=device,
            )
            for index, dims in _rotations(spec)
        },
        layout=torch_layout(described, formats, device),
    )
    around = source.head.around
    linears = {slot: partial(reader.projection(slot, around), kernels) for slot in _linears(around)}
    norms = _norms(around, source, reader.dtype, device)
    source.release()
    on_device = None if ids is None else ids.to(device)
    return HeadModel(spec, layers, AroundWeights(linears, norms, embedding, on_device), kernels.rms_norm)


def _rotations(spec: HeadSpec) -> set[tuple[int, int]]:
    return {heads.rotation for heads in spec.layers.attentions}


def _linears(around: LayerParts) -> list[str]:
    return [slot for slot in ("fuse", "combine") if slot in around]


def _norms(around: LayerParts, source: HeadSource, dtype: torch.dtype, device: torch.device) -> Mapping[str, Tensor]:
    found = ((slot, around[slot]) for slot in VECTORS if slot in around)
    return {
        slot: torch.cat([source.take(part).to(device, dtype, copy=True) for part in parts]) for slot, parts in found
    }
