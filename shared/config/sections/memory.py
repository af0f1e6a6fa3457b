"""The KV cache: its size, its blocks, its type."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class MemorySettings(Section, frozen=True, kw_only=True):
    TITLE = "Memory"
    block_size: Annotated[
        Literal[8, 16, 32, 64], advanced("Tokens in a KV block. The native kernels on AVX-512 need 16 or more.")
    ] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"],
        advanced(
            "Type of the KV cache. int8 is scaled per token and head, fp8 (the same as fp8_e4m3) per head, by a "
            "checkpoint's scales or not at all; fp8_e5m2 is for a CPU. auto: the type of the weights, bfloat16 beside "
            "int8 and int4."
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
    enable_partial_block_hits: Annotated[
        bool,
        advanced("Reuse equal prefixes to the token: the beginning of the block behind the last full one is copied."),
    ] = False
    store_memory: Annotated[
        int,
        common(
            "Bytes of memory in which each store keeps full blocks of the KV cache, for workers that have lost or "
            "evicted theirs; as a number, or as 512MiB or 1GiB. 0: there is no store."
        ),
    ] = 0
    store_disk: Annotated[
        str,
        advanced(
            "Directory in which each store also keeps its blocks, so that its next life finds them again and it holds "
            "more than its memory. It has what prompts were computed to: keep it as private as prompts. Empty: none."
        ),
    ] = ""
    store_disk_size: Annotated[int, advanced("Bytes of files that each store keeps in store_disk, such as 100GiB.")] = (
        16 << 30
    )
    store_backend: Annotated[
        str,
        advanced(
            "Another system in which stores keep blocks too, and find those of other stores: mooncake://HOST:PORT (its "
            "master), lmcache://HOST:PORT or nixl://POSIX/DIR. It has what prompts were computed to. Empty: none."
        ),
    ] = ""
    verify_fetches: Annotated[
        int,
        advanced(
            "Of so many times that blocks are fetched from a store, the last block is computed once, and compared with "
            "the store's: one that does not have what was computed is not asked again. 0: never."
        ),
    ] = 16
    share_blocks: Annotated[
        Literal["auto", "on", "off"],
        advanced(
            "Whether a worker gives full blocks of its KV cache to other workers that lack them, over data links, "
            "which are not encrypted. auto: on one host (ipc), and where workers have roles."
        ),
    ] = "auto"

    @property
    def cache_labels(self) -> dict[str, str]:
        """As vLLM's metric vllm:cache_config_info has them."""
        return {
            "block_size": str(self.block_size),
            "cache_dtype": self.kv_cache_dtype,
            "enable_prefix_caching": str(self.enable_prefix_caching),
        }
