"""The decoder's dimensions, read from a checkpoint's config.json and checked before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.modeling.rope_config import RopeConfig, parse_rope
from shared.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
QWEN3_HEAD_DIM = 128  # what the family means by a head_dim left out; the others mean hidden_size / heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]  # of each layer, in tokens; 0: every earlier token is seen
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint, empty where it does not say
    initializer_range: float

    @property
    def longest_model_len(self) -> int:
        """Tokens that the position embedding can address, with rope scaling."""
        return max(self.max_position_embeddings, self.rope.reach(self.max_position_embeddings))


def read_config(directory: Path) -> ModelConfig:
    """The configuration in `directory`.  Raises ModelError naming the file and key."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    try:
        return parse_config(content)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's content, checked.  Raises ModelError naming the key."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    hidden_size, num_heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    num_kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
    num_layers = positive_int(raw, "num_hidden_layers")
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = _head_dim(raw, architecture, hidden_size, num_heads)
    max_positions = positive_int(raw, "max_position_embeddings")
    attention_bias = _flag(raw, "attention_bias") and architecture != "MistralForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=parse_rope(raw, max_positions),
        windows=_windows(raw, architecture, num_layers),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
        initializer_range=_number(raw, "initializer_range", 0.02),
    )


def positive_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("architectures is missing or empty")
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    if (scheme := raw.get("quantization_config")) is not None and not _only_kv_cache(scheme):
        raise ModelError("quantization_config: quantized checkpoints are not supported, but for an fp8 KV cache alone")
    if raw.get("partial_rotary_factor", 1.0) not in (1, None):
        raise ModelError(f"partial_rotary_factor {raw['partial_rotary_factor']!r} is not supported; supported: 1.0")


def _only_kv_cache(scheme: Any) -> bool:
    """Whether an exporter's scheme leaves the weights as they are, and has static scales of an E4M3 cache."""
    if not isinstance(scheme, dict) or scheme.get("config_groups"):
        return False
    if scheme.get("quant_method") == "modelopt":
        return scheme.get("quant_algo") is None and scheme.get("kv_cache_quant_algo") == "FP8"
    cache = scheme.get("kv_cache_scheme")
    if scheme.get("quant_method") != "compressed-tensors" or not isinstance(cache, dict):
        return False
    return (cache.get("type"), cache.get("num_bits"), bool(cache.get("dynamic"))) == ("float", 8, False)


def _head_dim(raw: Mapping[str, Any], architecture: str, hidden_size: int, num_heads: int) -> int:
    default = QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    if raw.get("head_dim") is None and architecture != "Qwen3ForCausalLM" and hidden_size % num_heads:
        raise ModelError(
            f"head_dim is missing and hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
        )
    head_dim = positive_int(raw, "head_dim", default)
    if head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    if raw.get("sliding_window") is None or architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    if qwen and not _flag(raw, "use_sliding_window"):
        return (0,) * num_layers
    window = positive_int(raw, "sliding_window")
    kinds = raw.get("layer_types") if qwen else None
    if kinds is None:
        first = int(raw.get("max_window_layers") or 0) if qwen else 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"layer_types must list {num_layers} layers, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"layer_types has unsupported kinds: {', '.join(unknown)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)
