"""Settings: defaults < pageant.toml < PAGEANT_* environment < command line.  The environment is read here only."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ConfigError

PREFIX = "PAGEANT_"
MAX_DRAFT_TOKENS = 64
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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment's settings; names of limits are vLLM's.  Sizes in bytes, times in seconds, lengths in tokens."""

    # model
    model: str = "models/pageant-stories"
    served_model_name: str = ""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Literal["none", "int8"] = "none"  # of the weights, at load
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"  # on a CPU; auto: native ones where they can be had
    cpu_target: Literal["native", "x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake"] = "native"
    batch_invariant: bool = True  # no row depends on the batch; free with native kernels, so costs only torch's
    num_threads: int = 0  # of the worker's CPU kernels; 0: one per core
    attention_backend: Literal["auto", "triton", "flashinfer", "flashattention"] = "auto"  # on a GPU; auto: triton
    enforce_eager: bool = False  # on a GPU: no graphs
    # memory
    block_size: Literal[8, 16, 32, 64] = 16
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = "auto"  # fp8: on a GPU
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int = 0  # 0: from gpu_memory_utilization on a GPU, 1 GiB or less on a CPU
    num_blocks: int = 0  # overrides the memory plan
    enable_prefix_caching: bool = True
    # scheduling
    max_model_len: int = 0  # 0: what the model and the memory allow
    max_input_length: int = 0  # 0: max_model_len - 1
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: off
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    priority_ageing: float = 30.0  # seconds of waiting that are worth one step of priority
    tenant_weights: str = ""  # shares of tenants that wait, "acme=2,beta=0.5"; 1 for the others
    fair_prefill_tokens: int = 512  # of prompts in a step, of tenants that ask for more than their share; 0: no limit
    routing_policy: Literal["round_robin", "least_loaded", "prefix_aware"] = "prefix_aware"  # of several workers
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int = 16 << 20
    max_logprobs: int = 20
    max_n: int = 64
    # speculation
    draft: str = "off"  # "off", "ngram" (prompt lookup), or a model: a directory with the same tokenizer
    num_draft_tokens: int = 0  # per sequence and step; 0: as many as measurement says, down to none
    max_num_draft_tokens: int = 8
    acceptance: Literal["coupled", "rejection"] = "coupled"  # coupled: the same tokens as without drafts
    prompt_lookup_min: int = 2  # tokens of the suffix that n-gram lookup finds again
    prompt_lookup_max: int = 5
    draft_kv_cache_memory: int = 256 << 20
    draft_num_threads: int = 1
    # front
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000  # -1: no HTTP
    tool_call_parser: Literal["", "hermes", "llama3_json", "mistral"] = ""  # how the model writes calls; empty: not
    reasoning_parser: Literal["", "qwen3", "deepseek_r1"] = ""
    share_port: bool = False  # with other gateways of this host; one that leaves lets go of it at once
    max_request_bytes: int = 32 << 20
    max_prompt_bytes: int = 4 << 20
    template_timeout: float = 1.0
    num_tokenizer_threads: int = 1
    # who may ask
    api_keys: str = ""  # "tenant:key, ..." or keys alone; none here nor in the file: whoever reaches the port may ask
    api_keys_file: str = ""  # the same, one to a line
    tls_cert_file: str = ""  # PEM; with it and its key the gateway speaks TLS only
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # PEM; clients must show a certificate that this authority has signed
    # admission, at each gateway: a request counts with its prompt and all tokens that it may ask for
    max_open_reqs: int = 0  # 0: twice what the scheduler queues and runs
    max_open_tokens: int = 0  # 0: twice max_num_queued_tokens
    max_tenant_reqs: int = 0  # 0: no limit of a tenant's own
    max_tenant_tokens: int = 0
    max_unread_bytes: int = 64 << 20  # output of one request that waits for a client who does not read
    # the troupe
    transport: Literal["ipc", "tcp"] = "ipc"
    runtime_dir: str = ""  # sockets (ipc) and keys (tcp); default: a private directory per user
    scheduler_host: str = "127.0.0.1"  # tcp only
    scheduler_port: int = 5550  # tcp only
    advertise_host: str = ""  # tcp only: how others reach us; default: our address on the scheduler's network
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 2.5  # who was silent for so long is given up, an interval later at the latest
    resume_timeout: float = 30.0  # that a stream waits for the return of a service before it ends
    drain_timeout: float = 5.0  # that one has for what it is at when all stop (SIGTERM)
    handover_timeout: float = 60.0  # and when it leaves alone, and others take its place (SIGUSR1)
    status_file: str = ""  # renewed while the service is well; for container health checks
    stall_timeout: float = 5.0  # until health says so where work waits and nothing goes on
    reconcile_interval: float = 5.0  # between looks at whether scheduler and workers agree on who holds what
    incident_dir: str = ""  # a file for each stall and fatal error; default: incidents in the runtime directory
    max_incidents: int = 8  # kept of each service
    record: str = ""  # a file in which the scheduler notes what it is asked, token ids too: for `pageant replay`
    record_bytes: int = 256 << 20  # of it and what it was rotated to, at most; the newest is kept
    record_steps: str = ""  # a file in which the worker notes every step: what `pageant simulate` is fitted to
    # what is told
    metrics_port: int = -1  # of /metrics at each service, for Prometheus; 0: any free one; -1: none
    log_steps: bool = False  # a log line for each step, which `pageant trace` draws
    tracing: bool = True  # each request's time is accounted for, and services say what they do for each
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name

    def check(self) -> None:
        """Raise ConfigError on values that cannot work together."""
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_n", "max_num_queued_reqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running sequence can take its token"
            )
        if not 1 <= self.max_num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"max_num_draft_tokens must be in 1..{MAX_DRAFT_TOKENS}, got {self.max_num_draft_tokens}")
        if not 0 <= self.num_draft_tokens <= self.max_num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens must be in 0..max_num_draft_tokens={self.max_num_draft_tokens}, "
                f"got {self.num_draft_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError("prompt_lookup_min must be at least 1 and at most prompt_lookup_max")
        if not -1 <= self.http_port <= 65535:
            raise ConfigError(f"http_port must be in -1..65535, got {self.http_port}")
        if not -1 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port must be in -1..65535, got {self.metrics_port}")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError("heartbeat_timeout must be longer than heartbeat_interval")
        if self.stall_timeout <= self.heartbeat_interval:
            raise ConfigError("stall_timeout must be longer than heartbeat_interval")
        for name in ("max_unread_bytes", "max_incidents", "record_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("tls_cert_file and tls_key_file must be given together")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file")

    @property
    def incident_path(self) -> Path:
        """Where incidents are written; not created here."""
        return Path(self.incident_dir) if self.incident_dir else self.runtime_path / "incidents"

    @property
    def runtime_path(self) -> Path:
        """The private directory of this deployment's sockets and keys; not created here."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/pageant-{os.getuid()}") / "pageant"


def load_settings(
    overrides: Mapping[str, Any] | None = None, *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from all sources, checked.  Raises ConfigError naming the source and the setting."""
    known = {field.name for field in msgspec.structs.fields(Settings)}
    merged: dict[str, Any] = {}
    environ = os.environ if environ is None else environ
    path = file or (Path(environ["PAGEANT_CONFIG"]) if environ.get("PAGEANT_CONFIG") else None)
    if path is not None:
        merged |= _read_file(path, known)
    for name, value in environ.items():
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key in known and value != "":
            merged[key] = value
    merged |= {key: value for key, value in (overrides or {}).items() if value is not None}
    try:
        settings = msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    settings.check()
    return settings


def settings_environment(settings: Settings) -> dict[str, str]:
    """The PAGEANT_* variables under which a child process reads these same settings."""
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in msgspec.structs.asdict(settings).items()}


def _read_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    unknown = sorted(set(content) - known)
    if unknown:
        raise ConfigError(f"{path} has unknown settings: {', '.join(unknown)}")
    return content
