"""The settings that the scheduler's core needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Names, units and defaults as in shared.config.Settings."""

    max_model_len: int = 0
    max_input_length: int = 0
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enable_partial_block_hits: bool = False
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    routing_policy: str = "prefix_aware"
    priority_ageing: float = 30.0
    tenant_weights: str = ""
    fair_prefill_tokens: int = 512
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int = 16 << 20
    max_num_queued_background_reqs: int = 4096
    background_step_tokens: int = 32
    max_logprobs: int = 20
    max_n: int = 64
    resume_timeout: float = 30.0
    num_draft_tokens: int = 0
    max_num_draft_tokens: int = 8
    acceptance: str = "coupled"
    verify_fetches: int = 16
