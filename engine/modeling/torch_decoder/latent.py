"""Latent attention in torch: queries are taken to the latents, so that keys and values of heads are never made.

A head's score with a token is q . (K c) + r . p for its query's plain part q and rotated part r, the token's latent c
and rotated part p: the same as (K^T q) . c + r . p.  Its output is V sum(p c).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.spec import AttentionSpec, LatentSpec
from engine.modeling.rope import Rotation
from engine.modeling.torch_decoder.inputs import PoolInputs
from engine.modeling.torch_decoder.projection import Projection
from kernels.interface import Kernels
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.linears.head_linear import HeadWeights


@dataclass(frozen=True, slots=True)
class LatentWeights:
    shape: LatentSpec
    query_norm: Tensor | None  # [query_rank]
    query_up: Projection | None  # [num_heads * (plain + rotated), query_rank]
    key_norm: Tensor  # [rank]
    key_up: HeadWeights  # [num_heads, rank, plain]
    value_up: HeadWeights  # [num_heads, value_dim, rank]

    def attend(
        self,
        kernels: Kernels,
        heads: AttentionSpec,
        mixed: Tensor,  # [num_tokens, what queries are made of + rank + rotated]
        rotation: Rotation,
        inputs: PoolInputs,
        cache: KVCache,  # written
    ) -> Tensor:  # [num_tokens, num_heads * value_dim]
        shape = self.shape
        first = mixed.shape[1] - shape.rank - shape.rotated
        given, latent, turned = mixed.tensor_split((first, first + shape.rank), dim=1)
        latent = kernels.rms_norm(latent.contiguous(), self.key_norm, shape.norm_eps)
        key = torch.cat((latent[:, None], kernels.rotary(turned[:, None], *rotation)), dim=-1)
        kernels.store_kv(key, None, cache, inputs.slot_mapping)
        query = self._queries(kernels, given).reshape(len(mixed), heads.num_heads, shape.plain + shape.rotated)
        plain, turned = query.tensor_split((shape.plain,), dim=-1)
        met = kernels.head_linear(plain, self.key_up)
        query = torch.cat((met, kernels.rotary(turned, *rotation)), dim=-1)
        mixed = kernels.paged_attention(query, cache, inputs.attention, heads.score_scale, heads.window)
        return kernels.head_linear(mixed, self.value_up).flatten(1)

    def _queries(
        self,
        kernels: Kernels,
        given: Tensor,  # [num_tokens, query_rank], or queries
    ) -> Tensor:  # [num_tokens, num_heads * (plain + rotated)]
        if self.query_norm is None or self.query_up is None:
            return given
        return self.query_up(kernels, kernels.rms_norm(given.contiguous(), self.query_norm, self.shape.norm_eps))
