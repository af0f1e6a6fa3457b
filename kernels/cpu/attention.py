"""Paged attention in float64, so that shapes and paddings leave no trace in the float32 that comes out.

Products and sums in float64 differ between batches by about 1e-16 at most; rounded back to float32 that shows with a
chance of about 1e-8 per element.  Decoding sequences of similar length are one batched product; prompts go in pieces of
at most MAX_QUERIES queries, each over the keys that it can see.  In float32 it is faster, and batches leave a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.ops.attention import attention as reference
from kernels.ops.attention.attention import AttentionMetadata, QueryGroup
from kernels.ops.attention.kv_cache import KVCache

MAX_QUERIES = 256  # bounds the scores' memory: num_heads x 256 x seq_len doubles
MAX_BATCHED_QUERIES = 8  # longer ones gain nothing from sharing a call

# One piece: (sequence, place of its first token in the step, its position, number of queries)
Piece = tuple[int, int, int, int]


def plan_attention(
    query_lens: Sequence[int],  # [num_seqs]
    seq_lens: Sequence[int],  # [num_seqs]
    block_tables: Tensor,  # [num_seqs, max_num_blocks] int64
    block_size: int,
    windows: Sequence[int],
) -> AttentionMetadata:
    plain = reference.plan_attention(query_lens, seq_lens, block_tables, block_size, windows)
    pieces = _cut(query_lens, seq_lens)
    groups = {window: _group(pieces, block_tables, block_size, window) for window in windows}
    return AttentionMetadata(plain.query_start_loc, plain.seq_lens, plain.block_tables, groups)


def _cut(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[Piece]:
    pieces: list[Piece] = []
    starts = accumulate(query_lens, initial=0)
    for index, (start, num_queries, seq_len) in enumerate(zip(starts, query_lens, seq_lens, strict=False)):
        for offset in range(0, num_queries, MAX_QUERIES):
            size = min(MAX_QUERIES, num_queries - offset)
            pieces.append((index, start + offset, seq_len - num_queries + offset, size))
    return pieces


def _group(
    pieces: list[Piece],
    block_tables: Tensor,  # [num_seqs, max_num_blocks] int64
    block_size: int,
    window: int,
) -> tuple[QueryGroup, ...]:
    groups: dict[tuple[int, int, int], list[tuple[Piece, int, int]]] = {}
    for piece in pieces:
        _, start, position, num_queries = piece
        first_block = max(0, position - window + 1) // block_size if window else 0
        num_blocks = (position + num_queries - 1) // block_size + 1 - first_block
        alone = 0 if num_queries <= MAX_BATCHED_QUERIES else start + 1
        groups.setdefault((num_queries, num_blocks.bit_length(), alone), []).append((piece, first_block, num_blocks))
    return tuple(_query_group(members, block_tables, block_size, window) for members in groups.values())


def _query_group(
    members: list[tuple[Piece, int, int]],  # piece, first block, number of blocks
    block_tables: Tensor,  # [num_seqs, max_num_blocks] int64
    block_size: int,
    window: int,
) -> QueryGroup:
    pieces, first_blocks, nums_blocks = zip(*members, strict=True)
    sequences, starts, positions, nums_queries = (torch.tensor(column) for column in zip(*pieces, strict=True))
    offsets = torch.arange(int(nums_queries[0]))
    first = torch.tensor(first_blocks)[:, None]  # [num_seqs, 1]
    columns = (first + torch.arange(max(nums_blocks))).clamp_(max=block_tables.shape[1] - 1)
    keys = first * block_size + torch.arange(max(nums_blocks) * block_size)  # [num_seqs, num_keys] positions
    queries = positions[:, None, None] + offsets[:, None]  # [num_seqs, num_queries, 1] positions
    hidden = keys[:, None] > queries
    if window:
        hidden |= keys[:, None] <= queries - window
    return QueryGroup(
        tokens=(starts[:, None] + offsets).flatten(),
        blocks=block_tables[sequences[:, None], columns].flatten(),
        hidden=hidden[:, None, None],
        num_seqs=len(members),
    )


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]; tokens beyond the plan give zeros
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float = 0.0,  # 0: none
    sinks: Tensor | None = None,  # [num_heads] float32
    *,
    compute: torch.dtype = torch.float64,
) -> Tensor:  # [num_tokens, num_heads, features of a value]
    out = query.new_zeros(*query.shape[:2], cache.values.shape[-1])
    for group in metadata.groups[window]:
        attended = _attend(query[group.tokens], cache, group, scale, softcap, sinks, compute)
        out[group.tokens] = attended.to(query.dtype)
    return out


def _attend(
    query: Tensor,  # [num_seqs * num_queries, num_heads, head_dim]
    cache: KVCache,
    group: QueryGroup,
    scale: float,
    softcap: float,
    sinks: Tensor | None,  # [num_heads] float32
    compute: torch.dtype,
) -> Tensor:  # [num_seqs * num_queries, num_heads, head_dim] of the dtype `compute`
    num_seqs, num_queries = group.num_seqs, query.shape[0] // group.num_seqs
    kv_heads, head_dim = cache.keys.shape[2:]
    keys = _by_sequence(cache.read_keys(group.blocks), num_seqs, compute).transpose(2, 3)
    grouped = (query.to(compute) * scale).view(num_seqs, num_queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    share = grouped.shape[2]
    scores = grouped.reshape(num_seqs, kv_heads, share * num_queries, head_dim) @ keys
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    shaped = scores.view(num_seqs, kv_heads, share, num_queries, -1).masked_fill_(group.hidden, float("-inf"))
    weights = _softmax(shaped, sinks).view_as(scores)
    values = _by_sequence(cache.read_values(group.blocks), num_seqs, compute)
    mixed = (weights @ values).view(num_seqs, kv_heads, share, num_queries, -1)
    return mixed.permute(0, 3, 1, 2, 4).reshape(*query.shape[:2], -1)


def _softmax(
    scores: Tensor,  # [num_seqs, num_kv_heads, share, num_queries, num_keys]
    sinks: Tensor | None,  # [num_heads] float32
) -> Tensor:  # [num_seqs, num_kv_heads, share, num_queries, num_keys]
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((column, scores), dim=-1), dim=-1)[..., 1:].contiguous()


def _by_sequence(
    gathered: Tensor,  # [num_seqs * num_blocks, block_size, num_kv_heads, head_dim]
    num_seqs: int,
    compute: torch.dtype,
) -> Tensor:  # [num_seqs, num_kv_heads, num_keys, head_dim]
    by_head = gathered.view(num_seqs, -1, *gathered.shape[2:]).transpose(1, 2)
    return by_head.to(compute, memory_format=torch.contiguous_format)
