"""Causal attention over a paged KV cache.

For the query at position p of a sequence, over its keys k at positions max(0, p - window + 1) ... p:

    out = sum_k softmax_k(scale * q . key_k) value_k        (window 0: all positions up to p)

Where there is a softcap, softcap * tanh(score / softcap) takes the place of each score.  Where a head has a sink, a
further term exp(sink), neither scaled nor capped, is added to the sum of its softmax; its value is zero.

The key of position i lies in block block_table[i // block_size] at offset i % block_size.  Each group of
num_heads / num_kv_heads query heads shares one KV head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with equally many queries, attended to together; made by a provider's planner."""

    tokens: Tensor  # [num_seqs * num_queries] places in the step's tokens
    blocks: Tensor  # [num_seqs * num_blocks] block ids, short tables padded with any block
    hidden: Tensor  # [num_seqs, 1, 1, num_queries, num_blocks * block_size] keys that a query must not see
    num_seqs: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Planned once per step, used by every layer.  `groups` belongs to the provider that planned it."""

    query_start_loc: Tensor  # [num_seqs + 1] int64
    seq_lens: Tensor  # [num_seqs] int64, with this step's tokens
    block_tables: Tensor  # [num_seqs, max_num_blocks] int64
    groups: Mapping[int, tuple[QueryGroup, ...]] = field(default_factory=dict)  # by window


class StaticPlan(Protocol):
    """Metadata whose tensors stay where they are, so that a captured graph reads each step's from them."""

    @property
    def metadata(self) -> AttentionMetadata: ...

    def fill(
        self,
        rows: NDArray[np.int64],  # [num_seqs] of the block tables
        query_lens: NDArray[np.int64],  # [num_seqs]
        seq_lens: NDArray[np.int64],  # [num_seqs] with this step's tokens
    ) -> None: ...


def plan_attention(
    query_lens: Sequence[int],  # [num_seqs]
    seq_lens: Sequence[int],  # [num_seqs]
    block_tables: Tensor,  # [num_seqs, max_num_blocks] int64
    block_size: int,
    windows: Sequence[int],  # the distinct windows of the layers
) -> AttentionMetadata:
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    device = block_tables.device
    return AttentionMetadata(torch.tensor(starts, device=device), torch.tensor(seq_lens, device=device), block_tables)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]; tokens beyond the plan give zeros
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float = 0.0,  # 0: none
    sinks: Tensor | None = None,  # [num_heads] float32
) -> Tensor:  # [num_tokens, num_heads, features of a value]
    out = query.new_zeros(*query.shape[:2], cache.values.shape[-1])
    starts = metadata.query_start_loc.tolist()
    for index, seq_len in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_tables[index, : -(-seq_len // cache.block_size)]
        tokens = slice(starts[index], starts[index + 1])
        keys = cache.read_keys(blocks).flatten(0, 1)[:seq_len]
        values = cache.read_values(blocks).flatten(0, 1)[:seq_len]
        out[tokens] = _attend(query[tokens], keys, values, scale, window, softcap, sinks)
    return out


def _attend(
    query: Tensor,  # [num_queries, num_heads, head_dim], the last ones of the sequence
    keys: Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: Tensor,  # [seq_len, num_kv_heads, head_dim]
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,  # [num_heads] float32
) -> Tensor:  # [num_queries, num_heads, head_dim]
    share = query.shape[1] // keys.shape[1]
    keys, values = (one.float().repeat_interleave(share, dim=1) for one in (keys, values))
    key_positions = torch.arange(keys.shape[0], device=query.device)
    positions = key_positions[-query.shape[0] :, None]
    hidden = key_positions > positions
    if window:
        hidden |= key_positions <= positions - window
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1), scores), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., -keys.shape[0] :]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
