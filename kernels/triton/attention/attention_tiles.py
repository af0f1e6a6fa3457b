"""Which program attends with which queries over which keys: planned once per step, on the host, for all layers.

A tile is some consecutive queries of one sequence, with all query heads that share a KV head, over a range of keys.
Decodes, verifications and pieces of prompts are tiles of one launch.  Where few queries see many keys the range is cut,
so that a long context keeps the whole device busy; what the parts give is merged afterwards.  Parts begin at multiples
of the split, so that where they are cut depends on positions alone and never on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops.attention.attention import AttentionMetadata
from kernels.ops.steps.transfer import to_device
from kernels.triton.launch import MIN_DOT, power_of_2

Ints = NDArray[np.int64]
Heads = tuple[int, int]  # query heads that share a KV head, and dimensions

TILE_FIELDS = 8  # row, first token, queries, position, first key, last key + 1, first partial (-1: none), splits
MERGE_FIELDS = 3  # token, first partial, splits
MAX_ROWS = 128  # queries x heads of a tile; fewer where heads are wide, which would not fit in registers
WIDE_HEAD, WIDEST_HEAD = 128, 256  # beyond the one half as many, beyond the other a quarter
MAX_SPLIT_QUERIES = 64  # an entry with more has tiles enough without being cut
SPLIT = 256  # keys
MAX_SPLITS = 64  # of the longest sequence


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of the layers that have one window and one shape of tiles."""

    counts: Tensor  # [2] int32: tiles, and tokens to be merged
    tiles: Tensor  # [at least counts[0], TILE_FIELDS] int32
    merges: Tensor  # [at least counts[1], MERGE_FIELDS] int32
    num_partials: int  # room for (query, part) pairs


@dataclass(frozen=True, slots=True)
class TileShape:
    """How large the tiles of a step are; fixed when a graph is captured."""

    rows: int  # a power of 2: queries x heads, padded
    queries: int
    heads: int = 1  # of those that share a KV head: all, or an even part of them where not all fit

    @staticmethod
    def choose(
        longest: int,  # queries of an entry
        group: int,  # query heads that share a KV head
        head_dim: int,
    ) -> TileShape:
        most = MAX_ROWS // (1 if head_dim <= WIDE_HEAD else 2 if head_dim <= WIDEST_HEAD else 4)
        heads = next(count for count in range(min(group, most), 0, -1) if group % count == 0)
        rows = min(most, power_of_2(longest * heads, at_least=MIN_DOT))
        rows = max(rows, power_of_2(heads))
        return TileShape(rows, rows // heads, heads)


def tile_shapes(heads: Sequence[Heads], longest: int) -> dict[Heads, TileShape]:
    """For entries of up to `longest` queries."""
    return {one: TileShape.choose(longest, *one) for one in heads}


def tile_kinds(windows: Sequence[int], shapes: Mapping[Heads, TileShape]) -> list[tuple[int, int]]:
    """Each window with each number of queries."""
    return [(window, queries) for window in windows for queries in sorted({one.queries for one in shapes.values()})]


@dataclass(frozen=True, slots=True)
class TiledAttention(AttentionMetadata):
    """`block_tables` is int32 and on the device, with one row per tile's row; query_start_loc and seq_lens stay on
    the host, where the tiles were made of them."""

    shapes: Mapping[Heads, TileShape] = field(default_factory=dict)
    tiles: Mapping[tuple[int, int], Tiles] = field(default_factory=dict)  # by window and queries of a tile


def split_size(max_model_len: int) -> int:
    """Keys of one part: a constant of the deployment, so that there are never more than MAX_SPLITS."""
    return max(SPLIT, power_of_2(-(-max_model_len // MAX_SPLITS)))


def plan_tiles(
    rows: Ints,  # [num_seqs] of the block tables
    query_lens: Ints,  # [num_seqs]
    seq_lens: Ints,  # [num_seqs] with this step's tokens
    *,
    queries: int,  # of a tile
    window: int,
    split: int,  # keys
) -> tuple[Ints, Ints, int]:  # tiles [n, TILE_FIELDS], the longest first; merges [m, MERGE_FIELDS]; partials
    per_entry = -(-query_lens // queries)
    entry = np.repeat(np.arange(len(rows)), per_entry)  # [num_uncut]
    offset = _within(per_entry) * queries
    num_queries = np.minimum(queries, query_lens[entry] - offset)
    position = seq_lens[entry] - query_lens[entry] + offset
    token = (np.cumsum(query_lens) - query_lens)[entry] + offset
    end = position + num_queries
    begin = np.maximum(0, position - window + 1) if window else np.zeros_like(position)
    first_part = begin // split
    parts = np.where(query_lens[entry] <= MAX_SPLIT_QUERIES, -(-end // split) - first_part, 1)
    needed = np.where(parts > 1, parts * num_queries, 0)
    partial = np.where(parts > 1, np.cumsum(needed) - needed, -1)

    uncut, part = np.repeat(np.arange(len(entry)), parts), _within(parts)  # [n]
    cut = parts[uncut] > 1
    low, high = (first_part[uncut] + part) * split, (first_part[uncut] + part + 1) * split
    low, high = (np.where(cut, bound, whole) for bound, whole in ((low, begin[uncut]), (high, end[uncut])))
    low, high = np.maximum(low, begin[uncut]), np.minimum(high, end[uncut])
    columns = (
        rows[entry][uncut], token[uncut], num_queries[uncut], position[uncut], low, high,
        np.where(cut, partial[uncut] + part, -1), parts[uncut],
    )  # fmt: skip
    tiles = np.stack(columns, axis=1)
    order = np.argsort(low - high, kind="stable")
    return tiles[order], _merges(token, num_queries, partial, parts), int(needed.sum())


def _merges(token: Ints, num_queries: Ints, partial: Ints, parts: Ints) -> Ints:  # [num_uncut] each
    chosen = np.flatnonzero(parts > 1)
    repeated = np.repeat(chosen, num_queries[chosen])
    query = _within(num_queries[chosen])
    return np.stack((token[repeated] + query, partial[repeated] + query * parts[repeated], parts[repeated]), axis=1)


def _padding(
    first: int,  # token
    end: int,  # token
    queries: int,  # of a tile
) -> Ints:  # [n, TILE_FIELDS]: tiles that see no key, and so give zeros and not what the memory held before
    token = np.arange(first, end, queries)
    tiles = np.zeros((len(token), TILE_FIELDS), np.int64)
    tiles[:, 1], tiles[:, 2] = token, np.minimum(queries, end - token)
    tiles[:, 6], tiles[:, 7] = -1, 1
    return tiles


def _within(counts: Ints) -> Ints:  # [n] -> [sum of counts]: 0 ... count - 1 of each
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def pack_tiles(
    plans: Sequence[tuple[Ints, Ints, int]],
) -> NDArray[np.int32]:  # one buffer, so that it takes one copy
    pieces = []
    for tiles, merges, _ in plans:
        pieces += [np.array([len(tiles), len(merges)]), tiles.ravel(), merges.ravel()]
    return np.concatenate(pieces).astype(np.int32)


def view_tiles(
    packed: Tensor,  # [sum over kinds] int32, on the device: counts, tiles and merges of each
    sizes: Sequence[tuple[int, int, int]],  # tiles, merges, partials of each kind
) -> list[Tiles]:
    found, start = [], 0
    for num_tiles, num_merges, num_partials in sizes:
        lengths = [2, num_tiles * TILE_FIELDS, num_merges * MERGE_FIELDS]
        counts, tiles, merges = torch.split(packed[start : start + sum(lengths)], lengths)
        found.append(Tiles(counts, tiles.view(-1, TILE_FIELDS), merges.view(-1, MERGE_FIELDS), num_partials))
        start += sum(lengths)
    return found


class StaticTiles:
    """The tiles of a graph: tensors of one size for all the steps that it will run, filled before each.

    Tiles, merges and partials have room for sequences of `longest_context` tokens; what a step does not need of that
    costs nothing, because programs read how many there are.
    """

    def __init__(
        self,
        shapes: Mapping[Heads, TileShape],
        windows: Sequence[int],
        block_tables: Tensor,  # [num_rows, max_num_blocks] int32
        *,
        num_tokens: int,
        longest_context: int,  # tokens
        split: int,  # keys
    ) -> None:
        parts = max(1, -(-longest_context // split))
        cut = num_tokens if parts > 1 else 0
        kinds = tile_kinds(windows, shapes)
        sizes = [(num_tokens * parts, cut, cut * parts)] * len(kinds)
        length = sum(2 + tiles * TILE_FIELDS + merges * MERGE_FIELDS for tiles, merges, _ in sizes)
        self._packed = torch.zeros(length, dtype=torch.int32, device=block_tables.device)
        self._split = split
        self._num_tokens = num_tokens
        self.metadata = TiledAttention(
            query_start_loc=torch.tensor([0, num_tokens]),
            seq_lens=torch.empty(0, dtype=torch.int64),
            block_tables=block_tables,
            shapes=shapes,
            tiles=dict(zip(kinds, view_tiles(self._packed, sizes), strict=True)),
        )

    def fill(
        self,
        rows: Ints,  # [num_seqs] of the block tables
        query_lens: Ints,  # [num_seqs]
        seq_lens: Ints,  # [num_seqs] with this step's tokens
    ) -> None:
        for (window, queries), room in self.metadata.tiles.items():
            tiles, merges, _ = plan_tiles(rows, query_lens, seq_lens, queries=queries, window=window, split=self._split)
            tiles = np.concatenate((tiles, _padding(int(query_lens.sum()), self._num_tokens, queries)))
            self._copy(room.tiles, tiles)
            self._copy(room.merges, merges)
            self._copy(room.counts, np.array([len(tiles), len(merges)]))

    def _copy(self, room: Tensor, records: Ints) -> None:
        room[: len(records)].copy_(to_device(records.astype(np.int32), room.device), non_blocking=True)
