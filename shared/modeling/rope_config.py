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
    common = {"theta": _positive("rope_theta", theta)}
    if kind == "default":
        return RopeConfig(**common)
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    common["factor"] = _factor(scaling, kind, original, max_position_embeddings)
    positions = int(_positive("original_max_position_embeddings", original or max_position_embeddings))
    if kind == "llama3":
        return RopeConfig(kind=kind, original_max_positions=positions, **common, **_llama3_bands(scaling))
    if kind == "yarn":
        return _yarn(scaling, positions, common)
    return RopeConfig(kind=kind, original_max_positions=max_position_embeddings, **common)


def _factor(scaling: Mapping[str, Any], kind: str, original: Any, max_position_embeddings: int) -> float:
    value = scaling.get("factor")
    if value is None and kind == "yarn" and original:
        value = max_position_embeddings / original
    if value is None:
        raise ModelError(f"rope type {kind!r} needs factor")
    return _positive("factor", value)


def _llama3_bands(scaling: Mapping[str, Any]) -> dict[str, float]:
    bands: dict[str, float] = {}
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in scaling:
            raise ModelError(f"rope type 'llama3' needs {key}")
        bands[key] = _positive(key, scaling[key])
    if bands["low_freq_factor"] >= bands["high_freq_factor"]:
        raise ModelError("low_freq_factor must be smaller than high_freq_factor")
    return bands


def _yarn(scaling: Mapping[str, Any], positions: int, common: Mapping[str, float]) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        original_max_positions=positions,
        beta_fast=_positive("beta_fast", scaling.get("beta_fast") or 32),
        beta_slow=_positive("beta_slow", scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, common["factor"]),
        **common,
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


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)
