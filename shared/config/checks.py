"""Which values of settings cannot work, alone or together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shared.config.sections.adapters import MAX_LORA_RANK, AdapterSettings
from shared.config.sections.engine import EngineSettings
from shared.config.sections.scheduling import SchedulingSettings
from shared.config.sections.speculation import MAX_DRAFT_TOKENS, SpeculationSettings
from shared.config.settings import Settings
from shared.errors import ConfigError
from shared.exposure import read_hosts, read_origins

AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_n",
    "max_num_queued_reqs",
    "max_num_queued_background_reqs",
    "background_step_tokens",
    "eplb_step_interval",
    "dbo_token_threshold",
    "max_unread_bytes",
    "max_incidents",
    "record_bytes",
    "max_connections",
    "max_connections_per_address",
    "max_receiving_bytes",
    "max_request_bytes",
    "max_prompt_bytes",
    "num_tokenizer_threads",
    "max_file_bytes",
    "max_tenant_file_bytes",
    "max_batch_lines",
    "batch_concurrency",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "store_disk_size",
    "kv_events_kept",
)
NOT_NEGATIVE = (
    "max_model_len",
    "max_input_length",
    "kv_cache_memory",
    "store_memory",
    "verify_fetches",
    "num_blocks",
    "num_threads",
    "draft_kv_cache_memory",
    "draft_num_threads",
    "max_open_reqs",
    "max_open_tokens",
    "max_tenant_reqs",
    "max_tenant_tokens",
    "fair_prefill_tokens",
    "max_loras",
    "num_redundant_experts",
    "max_cpu_loras",
    "max_response_bytes",
    "response_ttl",
    "sleep_after",
    "max_awake_models",
    "model_turn",
)
POSITIVE = (  # seconds
    "header_timeout",
    "idle_timeout",
    "body_timeout",
    "template_timeout",
    "heartbeat_interval",
    "reconcile_interval",
)
NUMBERS = ("heartbeat_timeout", "stall_timeout", "resume_timeout", "drain_timeout", "handover_timeout")  # of seconds
PORTS = {"port": 0, "http_port": -1, "metrics_port": -1, "scheduler_port": 0, "rank_port": 0}  # the least value of each
MAX_PORT = 65535
MAX_RANKS = 64


def check_settings(settings: Settings) -> None:
    """Raise ConfigError on values that cannot work."""
    _check_ranges(settings.flat())
    _check_scheduling(settings.scheduling)
    _check_speculation(settings.speculation)
    _check_adapters(settings.adapters)
    _check_ranks(settings)
    for name in ("store_disk", "store_backend"):
        if getattr(settings.memory, name) and not settings.memory.store_memory:
            raise ConfigError(f"{name} needs store_memory: blocks pass memory on their way there and back")
    if settings.events.kv_events_replay and not settings.events.kv_events:
        raise ConfigError("kv_events_replay needs kv_events")
    deployment, access = settings.deployment, settings.access
    if deployment.heartbeat_timeout <= deployment.heartbeat_interval:
        raise ConfigError("heartbeat_timeout must be longer than heartbeat_interval")
    if deployment.stall_timeout <= deployment.heartbeat_interval:
        raise ConfigError("stall_timeout must be longer than heartbeat_interval")
    if bool(access.tls_cert_file) != bool(access.tls_key_file):
        raise ConfigError("tls_cert_file and tls_key_file must be given together")
    if access.tls_client_ca_file and not access.tls_cert_file:
        raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file")
    read_hosts(access.allowed_hosts)
    read_origins(access.cors_allow_origins)


def _check_ranks(settings: Settings) -> None:
    engine = settings.engine
    if engine.enable_expert_parallel and engine.tensor_parallel_size == 1:
        raise ConfigError("enable_expert_parallel needs tensor_parallel_size above 1: ranks that divide the experts")
    if engine.enable_sequence_parallel and engine.tensor_parallel_size == 1:
        raise ConfigError("enable_sequence_parallel needs tensor_parallel_size above 1: ranks that divide rows")
    for field in ("enable_eplb", "num_redundant_experts"):
        if getattr(engine, field) and not engine.enable_expert_parallel:
            raise ConfigError(f"{field} needs enable_expert_parallel: ranks that have experts whole")
    if engine.num_redundant_experts and not engine.enable_eplb:
        raise ConfigError("num_redundant_experts needs enable_eplb, which finds the experts that most rows take")
    for field in ("tensor_parallel_reduce", "enable_dbo"):
        if getattr(engine, field) and not engine.has_torch_ranks:
            raise ConfigError(
                f"{field} needs ranks that compute with torch: tensor_parallel_size above 1, and kernels 'torch' or "
                "device 'cuda'"
            )
    if engine.ranks == 1:
        return
    name = engine.ranks_by
    if engine.ranks > MAX_RANKS:
        product = "tensor_parallel_size times " if engine.has_ranked_stages else ""
        raise ConfigError(f"{product}{name} must be at most {MAX_RANKS}")
    if engine.has_ranked_stages and engine.executor == "ray":
        raise ConfigError("executor is 'ray', which places no stages that are groups of ranks: use local or hosts")
    if engine.has_stages:
        for field, given, needed in (
            ("device", engine.device, ("auto", "cpu")),
            ("kernels", engine.kernels, ("auto", "native")),
        ):
            if given not in needed:
                raise ConfigError(f"{name} needs native kernels on a CPU, but {field} is {given!r}")
    elif engine.has_torch_ranks:
        _check_torch_ranks(engine)
    if settings.adapters.modules() and (engine.has_stages or engine.has_torch_ranks):
        kind = "ranks that compute with torch have" if engine.has_torch_ranks else "a pipeline of stages has"
        raise ConfigError(f"lora_modules must be empty where {name} is above 1: {kind} no adapters")
    if settings.speculation.has_head:
        draft = settings.speculation.draft
        raise ConfigError(f"draft is {draft!r}, but a group of ranks ({name} above 1) has no draft head")


def _check_torch_ranks(engine: EngineSettings) -> None:
    torch = "ranks that compute with torch (kernels 'torch' or device 'cuda')"
    for field in ("enable_expert_parallel", "enable_sequence_parallel"):
        if getattr(engine, field):
            raise ConfigError(f"{field} is for native kernels on a CPU, not for {torch}")
    if engine.attention_backend not in ("auto", "triton"):
        raise ConfigError(f"attention_backend {engine.attention_backend!r} does not serve {torch}; use triton")
    if engine.executor == "ray":
        raise ConfigError(f"executor is 'ray', which places no {torch}: use local or hosts")


def _check_ranges(values: Mapping[str, Any]) -> None:
    if not 0 < values["gpu_memory_utilization"] <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {values['gpu_memory_utilization']}")
    for names, least, words in ((AT_LEAST_ONE, 1, "be at least 1"), (NOT_NEGATIVE, 0, "not be negative")):
        for name in names:
            if values[name] < least:
                raise ConfigError(f"{name} must {words}, got {values[name]}")
    for name in POSITIVE:
        if not 0 < values[name] < math.inf:
            raise ConfigError(f"{name} must be a positive number of seconds, got {values[name]}")
    for name in NUMBERS:
        if math.isnan(values[name]):
            raise ConfigError(f"{name} must be a number of seconds, got {values[name]}")
    for name, least in PORTS.items():
        if not least <= values[name] <= MAX_PORT:
            raise ConfigError(f"{name} must be in {least}..{MAX_PORT}, got {values[name]}")


def _check_scheduling(settings: SchedulingSettings) -> None:
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({settings.max_num_seqs}), so that every running sequence can take its token"
        )


def _check_adapters(settings: AdapterSettings) -> None:
    if not 1 <= settings.max_lora_rank <= MAX_LORA_RANK:
        raise ConfigError(f"max_lora_rank must be in 1..{MAX_LORA_RANK}, got {settings.max_lora_rank}")
    if 0 < settings.max_cpu_loras < settings.max_loras:
        raise ConfigError(
            f"max_cpu_loras ({settings.max_cpu_loras}) must be at least max_loras ({settings.max_loras}): "
            "a worker holds the adapters of its steps"
        )
    settings.modules()


def _check_speculation(settings: SpeculationSettings) -> None:
    most = settings.max_num_draft_tokens
    if not 1 <= most <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"max_num_draft_tokens must be in 1..{MAX_DRAFT_TOKENS}, got {most}")
    if not 0 <= settings.num_draft_tokens <= most:
        raise ConfigError(
            f"num_draft_tokens must be in 0..max_num_draft_tokens={most}, got {settings.num_draft_tokens}"
        )
    if not 1 <= settings.prompt_lookup_min <= settings.prompt_lookup_max:
        raise ConfigError("prompt_lookup_min must be at least 1 and at most prompt_lookup_max")
