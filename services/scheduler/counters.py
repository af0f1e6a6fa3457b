"""What has happened so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Monotonic counts of one scheduler's life; token counts where the name says so."""

    num_preemptions: int = 0
    num_prefix_cache_queries: int = 0  # tokens
    num_prefix_cache_hits: int = 0  # tokens
    num_chunked_prefills: int = 0  # steps in which a prompt was computed in part
    num_block_copies: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0  # requests, as the four below
    num_aborted: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_worker_losses: int = 0
