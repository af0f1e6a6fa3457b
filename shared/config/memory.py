"""The KV cache: its size, its blocks, its type."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class MemorySettings(Section, frozen=True, kw_only=True):
    TITLE = "Memory"
    block_size: Annotated[
        Literal[8, 16, 32, 64], advanced("Tokens in a KV block. The native kernels on AVX-512 need 16 or more.")
    ] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8", "fp8"],
        advanced(
            "Type of the KV cache; int8 is scaled per token and head, fp8 is for a GPU. auto: the type of the weights, "
            "bfloat16 beside int8."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, common("Share of the GPU's memory for weights, activations and KV cache.")
    ] = 0.9
    kv_cache_memory: Annotated[
        int,
        common(
            "Bytes of KV cache. 0: on a GPU what gpu_memory_utilization leaves; on a CPU 1 GiB, or 40 % of the free "
            "memory if that is less."
        ),
    ] = 0
    num_blocks: Annotated[
        int,
        advanced("Number of KV blocks, in place of the memory plan; layers with a window get no more. 0: the plan's."),
    ] = 0
    enable_prefix_caching: Annotated[bool, advanced("Reuse the KV cache of equal prefixes, within one tenant.")] = True
