"""What a config.json says of rotary embeddings, under the old key (rope_scaling) and the new (rope_parameters)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One kind of position scaling; fields of other kinds keep their defaults."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp's ends are whole dimensions
    attention_factor: float = 1.0  # yarn: scales cos and sin

    def reach(self, max_position_embeddings: int) -> int:
        """Positions that the scaling makes usable."""
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_positions * self.factor)
        return max_position_embeddings


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Raises ModelError naming the key or the unsupported type."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"rope_scaling must be an object, got {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    theta = _positive("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    factor = _factor(scaling, kind, original, max_position_embeddings)
    positions = int(_positive("original_max_position_embeddings", original or max_position_embeddings))
    if kind == "llama3":
        return _llama3(scaling, theta, factor, positions)
    if kind == "yarn":
        return _yarn(scaling, theta, factor, positions)
    return RopeConfig(kind=kind, theta=theta, factor=factor, original_max_positions=max_position_embeddings)


def _factor(scaling: Mapping[str, Any], kind: str, original: Any, max_position_embeddings: int) -> float:
    value = scaling.get("factor")
    if value is None and kind == "yarn" and original:
        value = max_position_embeddings / original
    return _required({"factor": value}, kind, "factor")


def _llama3(scaling: Mapping[str, Any], theta: float, factor: float, positions: int) -> RopeConfig:
    low, high = (_required(scaling, "llama3", key) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError("low_freq_factor must be smaller than high_freq_factor")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_positions=positions,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Mapping[str, Any], theta: float, factor: float, positions: int) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=positions,
        beta_fast=_positive("beta_fast", scaling.get("beta_fast") or 32),
        beta_slow=_positive("beta_slow", scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, factor),
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv 2309.00071, section 3.4), with the two corrections that some checkpoints carry."""
    given = scaling.get("attention_factor")
    if given is not None:
        return _positive("attention_factor", given)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _required(scaling: Mapping[str, Any], kind: str, key: str) -> float:
    if scaling.get(key) is None:
        raise ModelError(f"rope type {kind!r} needs {key}")
    return _positive(key, scaling[key])


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)
