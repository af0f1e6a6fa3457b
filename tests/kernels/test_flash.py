"""What FlashInfer and FlashAttention would be called with, by stand-ins that attend as their documentation says."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.description.reading import read_config
from engine.loading.backend import choose_backend
from kernels.flash.attention import FlashAttention3, FlashInferAttention, HeadShape
from kernels.interface import reference_kernels
from kernels.ops.attention import attention
from kernels.ops.attention.kv_cache import KVCache
from kernels.provider import FLASH_LIBRARIES, select_kernels, with_flash
from shared.config import Settings
from shared.errors import ConfigError
from shared.text.model_source import resolve_model_dir

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 16
SCALE = 0.3
QUERY_LENS, SEQ_LENS = [1, 5, 20, 1], [33, 5, 48, 16]


def attend(
    query: Tensor, cache: KVCache, starts: Tensor, lengths: list[int], blocks: list[Tensor], window: int, softcap: float
) -> Tensor:
    """Sequence by sequence, each over its own blocks."""
    out = torch.empty_like(query)
    for index, length in enumerate(lengths):
        tokens = slice(int(starts[index]), int(starts[index + 1]))
        own = query[tokens]
        plan = attention.plan_attention([len(own)], [length], blocks[index][None].long(), BLOCK, [window])
        out[tokens] = attention.paged_attention(own, cache, plan, SCALE, window, softcap)
    return out


class Wrapper:
    """As flashinfer.BatchPrefillWithPagedKVCacheWrapper is documented."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(
        self, starts: Tensor, pages: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int, head_dim: int,
        page_size: int, *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float,
        **dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        assert (heads, kv_heads, head_dim, page_size, causal) == (HEADS, KV_HEADS, HEAD_DIM, BLOCK, True)
        assert sm_scale == SCALE
        assert {starts.dtype, pages.dtype, indices.dtype, last.dtype} == {torch.int32}
        self.starts, self.window, self.softcap = starts, window_left + 1, logits_soft_cap
        self.blocks = [indices[pages[index] : pages[index + 1]] for index in range(len(last))]
        self.lengths = [(len(own) - 1) * page_size + int(end) for own, end in zip(self.blocks, last, strict=True)]

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return attend(query, KVCache(*cache), self.starts, self.lengths, self.blocks, self.window, self.softcap)


class Libraries:
    BatchPrefillWithPagedKVCacheWrapper = Wrapper

    @staticmethod
    def flash_attn_with_kvcache(
        query: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> Tensor:  # fmt: skip
        assert causal and softmax_scale == SCALE and max_seqlen_q == max(QUERY_LENS)
        assert window_size == (-1, -1) or window_size[1] == 0
        lengths = cache_seqlens.tolist()
        blocks = [table[: -(-length // BLOCK)] for table, length in zip(page_table, lengths, strict=True)]
        return attend(query, KVCache(keys, values), cu_seqlens_q, lengths, blocks, window_size[0] + 1, softcap)


def served_by(library: str, heads: HeadShape) -> Any:
    return (
        FlashInferAttention(Libraries, heads, torch.device("cpu"))
        if library == "flashinfer"
        else FlashAttention3(Libraries)
    )


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("library", ["flashinfer", "flashattention"])
def test_the_reference_s_result(library: str, window: int, softcap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (12, BLOCK, KV_HEADS, HEAD_DIM)
    cache = KVCache(*(torch.randn(shape, generator=generator) for _ in range(2)))
    tables = torch.randperm(12, generator=generator).view(4, 3)
    query = torch.randn(sum(QUERY_LENS) + 2, HEADS, HEAD_DIM, generator=generator)
    served = served_by(library, HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, SCALE, softcap))
    for windows in ([window], [0, window]):
        metadata = served.plan_attention(QUERY_LENS, SEQ_LENS, tables, BLOCK, windows)
        found = served.paged_attention(query, cache, metadata, SCALE, window, softcap)
        plan = attention.plan_attention(QUERY_LENS, SEQ_LENS, tables, BLOCK, [window])
        wanted = attention.paged_attention(query, cache, plan, SCALE, window, softcap)
        torch.testing.assert_close(found, wanted)
        assert not found[-2:].any()


@pytest.mark.parametrize("library", ["flashinfer", "flashattention"])
def test_what_a_library_cannot_do_is_an_error_and_never_left_out(library: str) -> None:
    served = served_by(library, HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32, SCALE, 1.5))
    cache = KVCache(*(torch.zeros(12, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2)))
    plan = served.plan_attention(QUERY_LENS, SEQ_LENS, torch.arange(12).view(4, 3), BLOCK, [0])
    query = torch.zeros(sum(QUERY_LENS), HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="no sinks"):
        served.paged_attention(query, cache, plan, SCALE, 0, 1.5, torch.zeros(HEADS))
    if library == "flashinfer":
        for scale, softcap in ((SCALE, 0.0), (0.5, 1.5)):
            with pytest.raises(ValueError, match=r"planned for scale 0\.3 and softcap 1\.5"):
                served.paged_attention(query, cache, plan, scale, 0, softcap)


@pytest.mark.parametrize("library", sorted(FLASH_LIBRARIES))
def test_only_the_libraries_are_without_sinks(library: str) -> None:
    with patch("kernels.provider.import_module", lambda name: Libraries):
        heads = HeadShape(HEADS, KV_HEADS, HEAD_DIM, torch.float32)
        served = with_flash(reference_kernels(), library, heads, torch.device("cpu"))
    assert not served.attention_sinks
    assert reference_kernels().attention_sinks and select_kernels(torch.device("cpu"), torch.float32).attention_sinks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("backend", sorted(FLASH_LIBRARIES))
def test_the_library_itself_on_a_card(backend: str, window: int) -> None:
    """Where it is installed, beside the reference."""
    pytest.importorskip(FLASH_LIBRARIES[backend])
    device, heads = torch.device("cuda"), HeadShape(8, 2, 64, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    cache = KVCache(normal(64, BLOCK, 2, 64), normal(64, BLOCK, 2, 64))
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(1)).view(4, 16).to(device)
    query_lens, seq_lens = [1, 5, 200, 1], [250, 5, 240, 16]
    query = normal(sum(query_lens), 8, 64)
    served = with_flash(reference_kernels(), backend, heads, device)
    found = served.paged_attention(
        query, cache, served.plan_attention(query_lens, seq_lens, tables, BLOCK, [window]), 64**-0.5, window
    )
    plan = attention.plan_attention(query_lens, seq_lens, tables, BLOCK, [window])
    wanted = attention.paged_attention(query, cache, plan, 64**-0.5, window)
    torch.testing.assert_close(found, wanted, atol=5e-2, rtol=5e-2)


def test_a_cpu_has_neither() -> None:
    settings = Settings.of(attention_backend="flashinfer", device="cpu", kernels="torch")
    config = read_config(resolve_model_dir(settings.engine.model))
    with pytest.raises(ConfigError, match="attention_backend is 'flashinfer', which is for GPUs"):
        choose_backend(settings, config, torch.float32)


def test_one_that_is_not_installed_is_not_done_without_silently() -> None:
    with pytest.raises(ModuleNotFoundError):
        with_flash(reference_kernels(), "flashattention", HeadShape(4, 2, 8, torch.float32), torch.device("cpu"))
