"""Which values of settings cannot work, alone or together."""

from __future__ import annotations

import math

from shared.config.settings import MAX_DRAFT_TOKENS, Settings
from shared.errors import ConfigError
from shared.exposure import read_hosts, read_origins

AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_n",
    "max_num_queued_reqs",
    "max_unread_bytes",
    "max_incidents",
    "record_bytes",
    "max_connections",
    "max_connections_per_address",
    "max_receiving_bytes",
)
NOT_NEGATIVE = (
    "max_model_len",
    "max_input_length",
    "kv_cache_memory",
    "num_blocks",
    "num_threads",
    "draft_kv_cache_memory",
    "draft_num_threads",
    "max_open_reqs",
    "max_open_tokens",
    "max_tenant_reqs",
    "max_tenant_tokens",
    "fair_prefill_tokens",
)
POSITIVE = ("header_timeout", "idle_timeout", "body_timeout")  # seconds
PORTS = {"port": 0, "http_port": -1, "metrics_port": -1, "scheduler_port": 0}  # the least value of each
MAX_PORT = 65535


def check_settings(settings: Settings) -> None:
    """Raise ConfigError on values that cannot work."""
    _check_ranges(settings)
    _check_scheduling(settings)
    _check_speculation(settings)
    if settings.heartbeat_timeout <= settings.heartbeat_interval:
        raise ConfigError("heartbeat_timeout must be longer than heartbeat_interval")
    if settings.stall_timeout <= settings.heartbeat_interval:
        raise ConfigError("stall_timeout must be longer than heartbeat_interval")
    if bool(settings.tls_cert_file) != bool(settings.tls_key_file):
        raise ConfigError("tls_cert_file and tls_key_file must be given together")
    if settings.tls_client_ca_file and not settings.tls_cert_file:
        raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file")
    read_hosts(settings.allowed_hosts)
    read_origins(settings.cors_allow_origins)


def _check_ranges(settings: Settings) -> None:
    if not 0 < settings.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {settings.gpu_memory_utilization}")
    for names, least, words in ((AT_LEAST_ONE, 1, "be at least 1"), (NOT_NEGATIVE, 0, "not be negative")):
        for name in names:
            if getattr(settings, name) < least:
                raise ConfigError(f"{name} must {words}, got {getattr(settings, name)}")
    for name in POSITIVE:
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(settings, name)}")
    for name, least in PORTS.items():
        if not least <= getattr(settings, name) <= MAX_PORT:
            raise ConfigError(f"{name} must be in {least}..{MAX_PORT}, got {getattr(settings, name)}")


def _check_scheduling(settings: Settings) -> None:
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({settings.max_num_seqs}), so that every running sequence can take its token"
        )


def _check_speculation(settings: Settings) -> None:
    most = settings.max_num_draft_tokens
    if not 1 <= most <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"max_num_draft_tokens must be in 1..{MAX_DRAFT_TOKENS}, got {most}")
    if not 0 <= settings.num_draft_tokens <= most:
        raise ConfigError(
            f"num_draft_tokens must be in 0..max_num_draft_tokens={most}, got {settings.num_draft_tokens}"
        )
    if not 1 <= settings.prompt_lookup_min <= settings.prompt_lookup_max:
        raise ConfigError("prompt_lookup_min must be at least 1 and at most prompt_lookup_max")
