"""The planner and the op of `kernels.ops.attention.attention` on two libraries' functions.

The library comes as a module, so that what it is called with can be proved without it.  Neither is captured in graphs,
and neither knows sinks: `Kernels.attention_sinks` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops.attention.attention import AttentionMetadata
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.steps.transfer import to_device

WORKSPACE = 256 << 20  # bytes, as FlashInfer recommends


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and of the cache
    scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    softcap: float = 0.0  # 0: none

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class FlashMetadata(AttentionMetadata):
    """`query_start_loc` is int32 and on the device, and so are the others."""

    num_tokens: int = 0
    longest: int = 0  # queries of an entry
    wrappers: Mapping[int, Any] = field(default_factory=dict)  # FlashInfer's plans, by window


def _columns(
    query_lens: Sequence[int],  # [num_seqs]
    seq_lens: Sequence[int],  # [num_seqs]
    block_tables: Tensor,  # [num_seqs, max_num_blocks]
) -> FlashMetadata:
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    device = block_tables.device
    return FlashMetadata(
        query_start_loc=to_device(starts, device),
        seq_lens=to_device(np.array(seq_lens, np.int32), device),
        block_tables=block_tables.to(torch.int32),
        num_tokens=int(starts[-1]),
        longest=max(query_lens),
    )


def _check_sinks(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise ValueError("this library's attention has no sinks")


class FlashInferAttention:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`: prompts and decodes in one, one wrapper for each window."""

    def __init__(self, library: Any, shape: HeadShape, device: torch.device) -> None:
        self._library = library
        self._shape = shape
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}

    def plan_attention(
        self,
        query_lens: Sequence[int],  # [num_seqs]
        seq_lens: Sequence[int],  # [num_seqs]
        block_tables: Tensor,  # [num_seqs, max_num_blocks]
        block_size: int,
        windows: Sequence[int],
    ) -> FlashMetadata:
        plain, shape = _columns(query_lens, seq_lens, block_tables), self._shape
        lengths, device = np.array(seq_lens), block_tables.device
        counts = -(-lengths // block_size)
        held = np.arange(block_tables.shape[1]) < counts[:, None]
        pages = to_device(np.cumsum([0, *counts]).astype(np.int32), device)
        indices = plain.block_tables.flatten()[to_device(np.flatnonzero(held), device)]
        last = to_device(((lengths - 1) % block_size + 1).astype(np.int32), device)
        for window in windows:
            if window not in self._wrappers:
                wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
                self._wrappers[window] = wrapper
            self._wrappers[window].plan(
                plain.query_start_loc, pages, indices, last, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                block_size, causal=True, sm_scale=shape.score_scale, window_left=window - 1,
                logits_soft_cap=shape.softcap, q_data_type=shape.dtype, kv_data_type=shape.dtype,
            )  # fmt: skip
        return replace(plain, wrappers=self._wrappers)

    def paged_attention(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]; tokens beyond the plan give zeros
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,  # as planned; ValueError for another, and for another softcap
        window: int,
        softcap: float = 0.0,  # 0: none
        sinks: Tensor | None = None,  # ValueError where there are any
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        assert isinstance(metadata, FlashMetadata)
        _check_sinks(sinks)
        if (scale, softcap) != (self._shape.score_scale, self._shape.softcap):
            raise ValueError(f"planned for scale {self._shape.score_scale} and softcap {self._shape.softcap}")
        out = torch.zeros_like(query)
        planned = query[: metadata.num_tokens].contiguous()
        out[: metadata.num_tokens] = metadata.wrappers[window].run(planned, (cache.keys, cache.values))
        return out


class FlashAttention3:
    """`flash_attn_interface.flash_attn_with_kvcache`, whose pages may have any size."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def plan_attention(
        self,
        query_lens: Sequence[int],  # [num_seqs]
        seq_lens: Sequence[int],  # [num_seqs]
        block_tables: Tensor,  # [num_seqs, max_num_blocks]
        block_size: int,
        windows: Sequence[int],
    ) -> FlashMetadata:
        return _columns(query_lens, seq_lens, block_tables)

    def paged_attention(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]; tokens beyond the plan give zeros
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        softcap: float = 0.0,  # 0: none
        sinks: Tensor | None = None,  # ValueError where there are any
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        assert isinstance(metadata, FlashMetadata)
        _check_sinks(sinks)
        out = torch.zeros_like(query)
        out[: metadata.num_tokens] = self._library.flash_attn_with_kvcache(
            query[: metadata.num_tokens], cache.keys, cache.values, cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_tables, cu_seqlens_q=metadata.query_start_loc, max_seqlen_q=metadata.longest,
            softmax_scale=scale, causal=True, window_size=(window - 1, 0) if window else (-1, -1), softcap=softcap,
        )  # fmt: skip
        return out
