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

from kernels.ops.attention import AttentionMetadata
from kernels.triton.launch import MIN_DOT, power_of_2

Ints = NDArray[np.int64]

TILE_FIELDS = 8  # row, first token, queries, position, first key, last key + 1, first partial (-1: none), splits
MERGE_FIELDS = 3  # token, first partial, splits
MAX_ROWS = 128  # queries x heads of a tile
MAX_SPLIT_QUERIES = 64  # an entry with more has tiles enough without being cut
SPLIT = 512  # keys
MAX_SPLITS = 32  # of the longest sequence


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of the layers that have one window."""

    counts: Tensor  # [2] int32: tiles, and tokens to be merged
    tiles: Tensor  # [at least counts[0], TILE_FIELDS] int32
    merges: Tensor  # [at least counts[1], MERGE_FIELDS] int32
    num_partials: int  # room for (query, part) pairs


@dataclass(frozen=True, slots=True)
class TileShape:
    """How large the tiles of a step are; fixed when a graph is captured."""

    rows: int  # a power of 2: queries x heads that share a KV head, padded
    queries: int

    @staticmethod
    def choose(
        longest: int,  # queries of an entry
        group: int,  # query heads that share a KV head
    ) -> TileShape:
        rows = min(MAX_ROWS, power_of_2(longest * group, at_least=MIN_DOT))
        rows = max(rows, power_of_2(group))
        return TileShape(rows, rows // group)


@dataclass(frozen=True, slots=True)
class TiledAttention(AttentionMetadata):
    """`block_tables` is int32 and on the device, with one row per tile's row; query_start_loc and seq_lens stay on
    the host, where the tiles were made of them."""

    shape: TileShape = TileShape(MIN_DOT, 1)
    windows: Mapping[int, Tiles] = field(default_factory=dict)


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


def _within(counts: Ints) -> Ints:  # [n] -> [sum of counts]: 0 ... count - 1 of each
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def pack_tiles(
    plans: Sequence[tuple[Ints, Ints, int]],
    *,
    max_tiles: int = 0,  # room for so many of each plan; 0: for those that there are
    max_merges: int = 0,
) -> NDArray[np.int32]:  # one buffer, so that it takes one copy
    pieces = []
    for tiles, merges, _ in plans:
        counts = np.array([len(tiles), len(merges)])
        pieces += [counts, _padded(tiles, max_tiles), _padded(merges, max_merges)]
    return np.concatenate([piece.ravel() for piece in pieces]).astype(np.int32)


def _padded(records: Ints, size: int) -> Ints:
    return np.pad(records, ((0, max(0, size - len(records))), (0, 0)))


def view_tiles(
    packed: Tensor,  # [sum over windows] int32, on the device, from `pack_tiles`
    sizes: Sequence[tuple[int, int, int]],  # tiles, merges, partials of each window
) -> list[Tiles]:
    found, start = [], 0
    for num_tiles, num_merges, num_partials in sizes:
        lengths = [2, num_tiles * TILE_FIELDS, num_merges * MERGE_FIELDS]
        counts, tiles, merges = torch.split(packed[start : start + sum(lengths)], lengths)
        found.append(Tiles(counts, tiles.view(-1, TILE_FIELDS), merges.view(-1, MERGE_FIELDS), num_partials))
        start += sum(lengths)
    return found


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy that the host does not wait for: pinned memory is kept until the device has read it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
