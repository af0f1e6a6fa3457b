"""What a config.json says of rotary embeddings, under the old key (rope_scaling) and the new (rope_parameters)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.description.keys import positive
from shared.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
OLD_KINDS = {"su": "longrope"}
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One kind of position scaling; fields of other kinds keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    share: float = 1.0  # of a head's dimensions that are rotated, the first ones
    turning: float = 1.0  # proportional: of the pairs of two whole halves that turn, the first ones
    interleaved: bool = False  # neighbours are rotated together, not the dimensions of two halves
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp's ends are whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    short_factors: tuple[float, ...] = ()  # longrope, of each pair of dimensions: within the original length
    long_factors: tuple[float, ...] = ()  # longrope: for deployments that serve longer sequences

    def check(self, head_dim: int) -> None:
        """Raises ModelError where the rope does not fit heads of this size."""
        pairs = self.rotated(head_dim) // 2
        for key, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.kind == "longrope" and len(factors) != pairs:
                raise ModelError(f"{key} must have {pairs} numbers, got {len(factors)}")
        if self.rotated(head_dim) % 2 or not pairs:
            raise ModelError(f"partial_rotary_factor {self.share} leaves an odd number of dimensions, or none")

    def rotated(self, head_dim: int) -> int:
        """Dimensions of each head that turn with the position."""
        return int(head_dim * self.share)

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Where the dimensions of a head go, so that all ropes rotate a whole head by halves; None: they stay.

        Queries, keys and their norms are reordered alike at load, which leaves every score as it was.  Dimensions that
        are not rotated follow those of either half, and turn by no angle.
        """
        rotated = self.rotated(head_dim)
        if rotated == head_dim and not self.interleaved:
            return None
        turning, others = list(range(rotated)), list(range(rotated, head_dim))
        halves = (turning[::2], turning[1::2]) if self.interleaved else _halves(turning)
        rests = _halves(others)
        return tuple(halves[0] + rests[0] + halves[1] + rests[1])

    def reach(self, max_position_embeddings: int) -> int:
        """Positions that the scaling makes usable."""
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.kind in ("yarn", "longrope"):
            return int(self.original_max_positions * self.factor)
        return max_position_embeddings


def _halves(dimensions: list[int]) -> tuple[list[int], list[int]]:
    middle = len(dimensions) // 2
    return dimensions[:middle], dimensions[middle:]


def parse_rope(
    raw: Mapping[str, Any],
    max_position_embeddings: int,
    *,
    kind_of_layer: str = "",  # where rope_parameters has an object for each kind of layers: the kind
    theta: float = DEFAULT_THETA,  # where the file does not say
    partial: bool = False,  # whether the family can rotate a part of each head
) -> RopeConfig:
    """Raises ModelError naming the key or the unsupported type."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"rope_scaling must be an object, got {scaling!r}")
    scaling = scaling.get(kind_of_layer, scaling)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = OLD_KINDS.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    theta = positive("rope_theta", scaling.get("rope_theta") or raw.get("rope_theta") or theta)
    share = _share(raw, scaling, partial)
    if kind == "default":
        return RopeConfig(theta=theta, share=share)
    if kind == "proportional":
        return RopeConfig(kind=kind, theta=theta, turning=share, factor=positive("factor", scaling.get("factor", 1.0)))
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    if kind == "longrope":
        return _longrope(scaling, theta, share, original, max_position_embeddings)
    factor = _factor(scaling, kind, original, max_position_embeddings)
    positions = int(positive("original_max_position_embeddings", original or max_position_embeddings))
    if kind == "llama3":
        return replace(_llama3(scaling, theta, factor, positions), share=share)
    if kind == "yarn":
        return replace(_yarn(scaling, theta, factor, positions), share=share)
    return RopeConfig(
        kind=kind, theta=theta, share=share, factor=factor, original_max_positions=max_position_embeddings
    )


def _share(raw: Mapping[str, Any], scaling: Mapping[str, Any], partial: bool) -> float:
    share = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise ModelError(f"partial_rotary_factor {share!r} is not supported; supported: 1.0")
    return positive("partial_rotary_factor", share)


def _longrope(
    scaling: Mapping[str, Any], theta: float, share: float, original: Any, max_position_embeddings: int
) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753): factors of each pair of dimensions, one list for short sequences, one for long."""
    original = positive("original_max_position_embeddings", original or max_position_embeddings)
    lists = [scaling.get(key) for key in ("short_factor", "long_factor")]
    for key, found in zip(("short_factor", "long_factor"), lists, strict=True):
        if not isinstance(found, list) or not found:
            raise ModelError(f"rope type 'longrope' needs {key}, a list of numbers")
    short, long = (tuple(positive("short_factor or long_factor", one) for one in found or ()) for found in lists)
    factor = positive("factor", scaling.get("factor") or max_position_embeddings / original)
    given = scaling.get("attention_factor")
    stretch = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind="longrope",
        theta=theta,
        share=share,
        factor=factor,
        original_max_positions=int(original),
        attention_factor=stretch if given is None else positive("attention_factor", given),
        short_factors=short,
        long_factors=long,
    )


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
        beta_fast=positive("beta_fast", scaling.get("beta_fast") or 32),
        beta_slow=positive("beta_slow", scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, factor),
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv 2309.00071, section 3.4), with the two corrections that some checkpoints carry."""
    given = scaling.get("attention_factor")
    if given is not None:
        return positive("attention_factor", given)
    own, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and all_dims:
        return mscale(factor, own) / mscale(factor, all_dims)
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """By how much YaRN stretches queries and keys each, for sequences that are `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _required(scaling: Mapping[str, Any], kind: str, key: str) -> float:
    if scaling.get(key) is None:
        raise ModelError(f"rope type {kind!r} needs {key}")
    return positive(key, scaling[key])
