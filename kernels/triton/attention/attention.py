"""Causal attention over a paged KV cache: one launch for whatever mixture of entries a step has.

Rows of a tile are (query, head) pairs that share a KV head, so that the keys of a decode step meet the matrix units
with all query heads of their group at once, and are read once.  Softmax runs online in powers of two; parts of a long
context leave their log-sum-exp, by which a second launch weighs them (Dao et al., FlashAttention, 2022; Dao, Haziza,
Massa and Sizov, Flash-Decoding, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.attention.attention import AttentionMetadata
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.steps.transfer import to_device
from kernels.triton.attention.attention_merge import LOG2_E, NOTHING, TO_POWERS_OF_TWO, launch_merges, load_sinks
from kernels.triton.attention.attention_tiles import (
    SPLIT,
    WIDEST_HEAD,
    Heads,
    StaticTiles,
    TiledAttention,
    Tiles,
    TileShape,
    pack_tiles,
    plan_tiles,
    tile_kinds,
    tile_shapes,
    view_tiles,
)  # fmt: skip
from kernels.triton.attention.kv_format import PER_HEAD, PER_TOKEN, scales_of
from kernels.triton.launch import MIN_DOT, dot_type, num_programs, power_of_2, wait_for_others, when


def plan_attention(
    query_lens: Sequence[int],  # [num_seqs]
    seq_lens: Sequence[int],  # [num_seqs]
    block_tables: Tensor,  # [num_seqs, max_num_blocks]
    block_size: int,
    windows: Sequence[int],
    *,
    heads: Sequence[Heads] = ((1, 64),),
    split: int = SPLIT,  # keys
) -> TiledAttention:
    lengths, ends = np.array(query_lens, np.int64), np.array(seq_lens, np.int64)
    shapes = tile_shapes(heads, int(lengths.max()))
    rows, kinds = np.arange(len(lengths)), tile_kinds(windows, shapes)
    plans = [plan_tiles(rows, lengths, ends, queries=queries, window=window, split=split) for window, queries in kinds]
    packed = to_device(pack_tiles(plans), block_tables.device)
    tiles = view_tiles(packed, [(len(tiles), len(merges), partials) for tiles, merges, partials in plans])
    return TiledAttention(
        query_start_loc=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))),
        seq_lens=torch.from_numpy(ends),
        block_tables=block_tables.to(torch.int32),
        shapes=shapes,
        tiles=dict(zip(kinds, tiles, strict=True)),
    )


def static_attention(
    block_tables: Tensor,  # [num_rows, max_num_blocks] int32
    windows: Sequence[int],
    num_tokens: int,  # of a step
    longest: int,  # tokens of an entry
    longest_context: int,  # tokens of a sequence
    *,
    heads: Sequence[Heads] = ((1, 64),),
    split: int = SPLIT,  # keys
) -> StaticTiles:
    """Metadata for a graph, of steps of up to `num_tokens` tokens."""
    shapes = tile_shapes(heads, longest)
    return StaticTiles(
        shapes, windows, block_tables, num_tokens=num_tokens, longest_context=longest_context, split=split
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
    early: bool = False,  # as `launch.when` has it
) -> Tensor:  # [num_tokens, num_heads, features of a value]
    assert isinstance(metadata, TiledAttention)
    num_heads, value_dim = query.shape[1], cache.values.shape[3]
    shape = metadata.shapes[num_heads // cache.keys.shape[2], query.shape[2]]
    tiles = metadata.tiles[window, shape.queries]
    out = query.new_empty(*query.shape[:2], value_dim)
    out[int(metadata.query_start_loc[-1]) :].zero_()
    partial = query.new_empty(tiles.num_partials, num_heads, value_dim, dtype=torch.float32)
    lse = query.new_empty(tiles.num_partials, num_heads, dtype=torch.float32)
    _launch_tiles(
        query, cache, metadata.block_tables, tiles, shape, out, partial, lse, scale, window, softcap, sinks, early
    )  # fmt: skip
    if tiles.num_partials:
        launch_merges(tiles, out, partial, lse, sinks, early)
    return out


def _launch_tiles(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    cache: KVCache,
    block_tables: Tensor,  # [num_rows, max_num_blocks] int32
    tiles: Tiles,
    shape: TileShape,
    out: Tensor,  # [num_tokens, num_heads, head_dim]
    partial: Tensor,  # [num_partials, num_heads, head_dim] float32
    lse: Tensor,  # [num_partials, num_heads] float32
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,  # [num_heads] float32
    early: bool,
) -> None:
    num_kv_heads, head_dim = cache.keys.shape[2:]
    splits = query.shape[1] // num_kv_heads // shape.heads
    value_dim = cache.values.shape[3]
    further = head_dim - value_dim
    keys, num_warps, num_stages = _tuning(shape.rows, head_dim, query.element_size())
    key_scales, value_scales, scaled = scales_of(cache)
    attend_tiles[(num_programs(len(tiles.tiles) * num_kv_heads * splits, query.device),)](
        query, cache.keys, cache.values, key_scales, value_scales, block_tables, tiles.counts, tiles.tiles,
        out, partial, lse, lse if sinks is None else sinks, scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E, num_kv_heads, block_tables.stride(0),
        query.stride(0), query.stride(1), *cache.keys.stride()[:3], *cache.values.stride()[:3],
        GROUP=shape.heads, SPLITS=splits, QUERIES=shape.queries, ROWS=shape.rows, KEYS=keys,
        HEAD_DIM=value_dim, WIDTH=power_of_2(value_dim, at_least=MIN_DOT), LATENT=cache.latent,
        TURNED=power_of_2(further, at_least=MIN_DOT), EXTRA=further, BLOCK_SIZE=cache.block_size, WINDOW=window,
        SCALED=scaled, CAPPED=softcap != 0.0, SINKS=sinks is not None, DOT=dot_type(query.dtype),
        num_warps=num_warps, num_stages=num_stages, **when(early, query),
    )  # fmt: skip


def _tuning(rows: int, head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """Keys at a time, warps and pipeline stages: as much as registers hold without spilling (compiled for sm_90).

    Small tiles are bound by memory, and want the next keys on their way early; a table look-up takes a stage by itself.
    """
    if itemsize == 4:
        return 32 if head_dim <= WIDEST_HEAD else 16, 4 if rows <= 32 else 8, 2
    if head_dim > WIDEST_HEAD:
        return 32, 8, 2
    if rows <= 32:
        return 64 if head_dim <= 128 else 32, 4, 5
    return 64 if head_dim <= 128 else 32, 8, 3


@triton.jit
def attend_tiles(
    query: tl.tensor,  # [num_tokens, num_heads, head_dim]
    keys: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    key_scales: tl.tensor,  # [num_blocks, block_size, num_kv_heads] or [num_kv_heads] float32
    value_scales: tl.tensor,
    block_tables: tl.tensor,  # [num_rows, max_num_blocks] int32
    counts: tl.tensor,  # [2] int32
    tiles: tl.tensor,  # [num_tiles, 8] int32
    out: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial: tl.tensor,  # [num_partials, num_heads, HEAD_DIM] float32
    lse: tl.tensor,  # [num_partials, num_heads] float32, of powers of two
    sinks: tl.tensor,  # [num_heads] float32; read where SINKS
    scale: float,  # times log2(e), or where CAPPED over the cap
    cap: float,  # times log2(e)
    num_kv_heads: int,
    table_stride: int,
    query_stride: int,
    query_head_stride: int,
    key_block_stride: int,
    key_slot_stride: int,
    key_head_stride: int,
    value_block_stride: int,
    value_slot_stride: int,
    value_head_stride: int,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # of values; keys have as many, and where LATENT some more behind them
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_others(EARLY)
    lanes = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    further = tl.arange(0, TURNED)
    num_groups = num_kv_heads * SPLITS
    num_heads = num_groups * GROUP
    for item in range(tl.program_id(0), tl.load(counts) * num_groups, tl.num_programs(0)):
        record = tiles + (item // num_groups) * 8
        group = item % num_groups
        kv_head = group // SPLITS
        table = block_tables + tl.load(record).to(tl.int64) * table_stride
        first_token = tl.load(record + 1)
        num_queries = tl.load(record + 2)
        position = tl.load(record + 3)
        begin = tl.load(record + 4)
        end = tl.load(record + 5)
        partial_index = tl.load(record + 6)

        index = lanes // GROUP
        tokens = (first_token + index).to(tl.int64)
        heads = group * GROUP + lanes % GROUP
        real = (index < num_queries) & (index < QUERIES)
        held = real[:, None] & (columns < HEAD_DIM)[None, :]
        places = tokens[:, None] * query_stride + heads[:, None] * query_head_stride + columns[None, :]
        q = tl.load(query + places, mask=held, other=0.0).to(DOT)
        turned = q
        if LATENT:
            rest = real[:, None] & (further < EXTRA)[None, :]
            beside = tokens[:, None] * query_stride + heads[:, None] * query_head_stride + HEAD_DIM + further[None, :]
            turned = tl.load(query + beside, mask=rest, other=0.0).to(DOT)
        positions = position + index

        # Keys up to `clear` may be hidden by the window, those from `diagonal` on by causality; between them none is.
        diagonal = begin + tl.maximum(0, tl.minimum(position + 1, end) - begin) // KEYS * KEYS
        clear = begin
        if WINDOW > 0:
            hidden = tl.maximum(0, position + num_queries - WINDOW - begin)
            clear = tl.minimum(diagonal, begin + (hidden + KEYS - 1) // KEYS * KEYS)

        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        peak = tl.full((ROWS,), NOTHING, tl.float32)
        if SINKS:  # a part of a context leaves them to the merge
            peak = tl.where(partial_index < 0, load_sinks(sinks + heads, real), peak)
            total = tl.where(partial_index < 0, 1.0, total)
        head_keys = keys + kv_head * key_head_stride
        head_values = values + kv_head * value_head_stride
        if WINDOW > 0:
            for start in range(begin, clear, KEYS):
                acc, total, peak = fold_keys(
                    acc, total, peak, q, turned, head_keys, head_values, key_scales, value_scales, table, positions,
                    start, end, kv_head, num_kv_heads, scale, cap, key_block_stride, key_slot_stride,
                    value_block_stride, value_slot_stride,
                    True, KEYS, HEAD_DIM, WIDTH, LATENT, TURNED, EXTRA, BLOCK_SIZE, WINDOW, SCALED, CAPPED, DOT,
                )  # fmt: skip
        for start in range(clear, diagonal, KEYS):
            acc, total, peak = fold_keys(
                acc, total, peak, q, turned, head_keys, head_values, key_scales, value_scales, table, positions,
                start, end, kv_head, num_kv_heads, scale, cap, key_block_stride, key_slot_stride,
                value_block_stride, value_slot_stride,
                False, KEYS, HEAD_DIM, WIDTH, LATENT, TURNED, EXTRA, BLOCK_SIZE, WINDOW, SCALED, CAPPED, DOT,
            )  # fmt: skip
        for start in range(diagonal, end, KEYS):
            acc, total, peak = fold_keys(
                acc, total, peak, q, turned, head_keys, head_values, key_scales, value_scales, table, positions,
                start, end, kv_head, num_kv_heads, scale, cap, key_block_stride, key_slot_stride,
                value_block_stride, value_slot_stride,
                True, KEYS, HEAD_DIM, WIDTH, LATENT, TURNED, EXTRA, BLOCK_SIZE, WINDOW, SCALED, CAPPED, DOT,
            )  # fmt: skip
        if SCALED == PER_HEAD:
            acc = acc * tl.load(value_scales + kv_head)

        seen = tl.where(total > 0.0, total, 1.0)
        result = acc / seen[:, None]
        if partial_index < 0:
            places = (tokens * num_heads + heads)[:, None] * HEAD_DIM + columns[None, :]
            tl.store(out + places, result.to(out.dtype.element_ty), mask=held)
        else:
            parts = ((partial_index + index * tl.load(record + 7)).to(tl.int64) * num_heads) + heads
            tl.store(partial + parts[:, None] * HEAD_DIM + columns[None, :], result, mask=held)
            tl.store(lse + parts, tl.where(total > 0.0, peak + tl.log2(seen), NOTHING), mask=real)


@triton.jit
def fold_keys(
    acc: tl.tensor,  # [ROWS, WIDTH] float32
    total: tl.tensor,  # [ROWS] float32
    peak: tl.tensor,  # [ROWS] float32
    q: tl.tensor,  # [ROWS, WIDTH]
    turned: tl.tensor,  # [ROWS, TURNED]; read where LATENT
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,  # [num_blocks] int32
    positions: tl.tensor,  # [ROWS]
    start: int,
    end: int,
    kv_head: int,
    num_kv_heads: int,
    scale: float,
    cap: float,
    key_block_stride: int,
    key_slot_stride: int,
    value_block_stride: int,
    value_slot_stride: int,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax so far, with the next KEYS keys of the sequence."""
    columns = tl.arange(0, WIDTH)
    key_positions = start + tl.arange(0, KEYS)
    there = key_positions < end
    if MASKED:
        blocks = tl.load(table + key_positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + key_positions // BLOCK_SIZE).to(tl.int64)
    slots = key_positions % BLOCK_SIZE
    key_places = (blocks * key_block_stride + slots * key_slot_stride)[:, None] + columns[None, :]
    value_places = (blocks * value_block_stride + slots * value_slot_stride)[:, None] + columns[None, :]
    if MASKED or HEAD_DIM != WIDTH:
        held = there[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(keys + key_places, mask=held, other=0.0).to(DOT)
    else:
        k = tl.load(keys + key_places).to(DOT)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if LATENT:
        further = tl.arange(0, TURNED)
        beside = (blocks * key_block_stride + slots * key_slot_stride)[:, None] + HEAD_DIM + further[None, :]
        rest = there[:, None] & (further < EXTRA)[None, :]
        behind = tl.load(keys + beside, mask=rest, other=0.0).to(DOT)
        scores = tl.dot(turned, tl.trans(behind), scores, input_precision="ieee")
    scores = scores * scale
    if SCALED == PER_HEAD:
        scores = scores * tl.load(key_scales + kv_head)
    if SCALED == PER_TOKEN:
        scaled = (blocks * BLOCK_SIZE + slots) * num_kv_heads + kv_head
        scores = scores * tl.load(key_scales + scaled, mask=there, other=0.0)[None, :]
    if CAPPED:
        scores = cap * tanh(scores)
    if MASKED:
        visible = (key_positions[None, :] <= positions[:, None]) & there[None, :]
        if WINDOW > 0:
            visible = visible & (key_positions[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrunk = tl.exp2(peak - new_peak)
    total = total * shrunk + tl.sum(weights, 1)
    if SCALED == PER_TOKEN:
        weights = weights * tl.load(value_scales + scaled, mask=there, other=0.0)[None, :]
    if LATENT:
        v = k
    elif MASKED or HEAD_DIM != WIDTH:
        v = tl.load(values + value_places, mask=held, other=0.0).to(DOT)
    else:
        v = tl.load(values + value_places).to(DOT)
    acc = tl.dot(weights.to(DOT), v, acc * shrunk[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def tanh(
    x: tl.tensor,  # float32
) -> tl.tensor:
    small = tl.exp2(tl.abs(x) * (-2.0 * TO_POWERS_OF_TWO))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x >= 0.0, size, -size)
