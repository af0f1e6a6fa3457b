"""Scales of an fp8 KV cache that come with a checkpoint: what keys and values were calibrated to be divided by.

Exporters write them beside a layer's weights, one for the whole layer or one for each KV head, under one of three names
of the attention or of the projections that make keys and values.  A checkpoint has them for all layers or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from engine.description.names import NameTable
from engine.description.spec import AttentionSpec, ModelSpec
from engine.weights.inventory import KV_KEY_NAMES, KV_UNUSED_NAMES, KV_VALUE_NAMES, is_kv_scale
from shared.errors import ModelError


class KVScales(NamedTuple):
    """One layer's."""

    keys: Tensor  # [num_kv_heads] float32
    values: Tensor  # [num_kv_heads] float32


def read_kv_scales(
    spec: ModelSpec, table: NameTable, names: Collection[str], take: Callable[[str], Tensor]
) -> tuple[KVScales, ...]:  # of every layer with a cache, or empty
    """Of the tensors that a checkpoint has by these names.  Raises ModelError naming the tensor."""
    scales = {name for name in names if is_kv_scale(name) and not name.endswith(KV_UNUSED_NAMES)}
    if not scales:
        return ()
    found = []
    for layer, described in enumerate(spec.layers):
        if not isinstance(described.attention, AttentionSpec):
            continue
        keys, values = (_find(table, layer, kind, scales) for kind in (KV_KEY_NAMES, KV_VALUE_NAMES))
        scales -= {keys, values}
        found.append(KVScales(*(_read(name, take(name), described.attention.num_kv_heads) for name in (keys, values))))
    if scales:
        raise ModelError(f"tensor {min(scales)} scales no keys or values of this model, or does so a second time")
    return tuple(found)


def _find(table: NameTable, layer: int, kinds: tuple[str, ...], names: Collection[str]) -> str:
    wanted = [table.layer_prefix(layer) + kind for kind in kinds]
    for name in wanted:
        if name in names:
            return name
    raise ModelError(f"the checkpoint has scales of its KV cache, but for layer {layer} none of {', '.join(wanted)}")


def _read(name: str, stored: Tensor, num_kv_heads: int) -> Tensor:  # [num_kv_heads] float32
    if not stored.is_floating_point():
        raise ModelError(f"tensor {name} has dtype {stored.dtype}, expected a floating-point one")
    if stored.numel() not in (1, num_kv_heads) or max(stored.shape, default=1) != stored.numel():
        raise ModelError(
            f"tensor {name} has shape {list(stored.shape)}, expected one number, or one for each of the "
            f"{num_kv_heads} KV heads"
        )
    scales = stored.flatten().to(torch.float32, copy=True)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"tensor {name} holds {scales.tolist()}; scales are finite and above zero")
    return scales.expand(num_kv_heads).contiguous()
