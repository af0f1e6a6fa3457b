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
    # memory
    block_size: Literal[8, 16, 32, 64] = 16
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8"] = "auto"
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
    max_request_bytes: int = 32 << 20
    max_prompt_bytes: int = 4 << 20
    template_timeout: float = 1.0
    num_tokenizer_threads: int = 1
    # the troupe
    transport: Literal["ipc", "tcp"] = "ipc"
    runtime_dir: str = ""  # sockets (ipc) and keys (tcp); default: a private directory per user
    scheduler_host: str = "127.0.0.1"  # tcp only
    scheduler_port: int = 5550  # tcp only
    advertise_host: str = ""  # tcp only: how others reach us; default: our address on the scheduler's network
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 3.0
    drain_timeout: float = 5.0
    status_file: str = ""  # renewed while the service is well; for container health checks
    # logs
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
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError("heartbeat_timeout must be longer than heartbeat_interval")

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
