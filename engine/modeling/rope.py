"""Rotary frequencies for every scaling, and the table of cosines and sines made from them once at load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.rope import RopeConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines of a step's tokens, each [num_tokens, 1, head_dim]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, laid out as `kernels.ops.attention.rotary` wants them."""

    cos: Tensor  # [max_positions, 1, head_dim]
    sin: Tensor  # [max_positions, 1, head_dim], the first half negated


def build_rope_table(
    rope: RopeConfig | None, head_dim: int, max_positions: int, *, dtype: torch.dtype, device: torch.device
) -> RopeTable:
    """Without a rope nothing turns: cosines are one, sines zero.

    Where only a part of each head is rotated, the others' angles are zero.  `head_order` says which dimension then
    stands where.
    """
    angles = torch.zeros(max_positions, head_dim // 2)
    factor = 1.0
    if rope is not None:
        turning, factor = frequencies(rope, rope.rotated(head_dim), max_positions), rope.attention_factor
        angles[:, : len(turning)] = torch.outer(torch.arange(max_positions).float(), turning)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if rope is not None and rope.rotated(head_dim) < head_dim:
        cos[:, rope.rotated(head_dim) // 2 :] = 1.0
    both = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return RopeTable(*(table[:, None].to(device=device, dtype=dtype) for table in both))


def frequencies(rope: RopeConfig, rotated: int, max_positions: int) -> Tensor:  # [rotated / 2] float32
    """Radians per position of each pair of dimensions that are rotated."""
    base = _base_frequencies(rope.theta, rotated)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "proportional":
        turning = torch.arange(rotated // 2) < int(rope.turning * rotated // 2)
        return base / rope.factor * turning
    if rope.kind == "dynamic":
        return _base_frequencies(_dynamic_theta(rope, rotated, max_positions), rotated)
    if rope.kind == "llama3":
        return _smooth_llama3(base, rope)
    if rope.kind == "yarn":
        return _ramp_yarn(base, rope, rotated)
    if rope.kind == "longrope":
        return base / _long_factors(rope, max_positions)
    return base


def _long_factors(rope: RopeConfig, max_positions: int) -> Tensor:  # [rotated / 2]
    """One list for the whole deployment, by its longest sequence: a token's key depends on its own history alone."""
    factors = rope.long_factors if max_positions > rope.original_max_positions else rope.short_factors
    return torch.tensor(factors)


def _base_frequencies(theta: float, head_dim: int) -> Tensor:  # [head_dim / 2] float32
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_positions: int) -> float:
    """The NTK base for the longest sequence that this deployment serves.

    The usual definition takes the length of the sequence so far, so that a key already in the cache would change
    as its sequence grows.  Here a token's key depends on its own history only: the base is fixed at load, and equals
    the usual one's wherever the deployment's max_model_len is within the original length.
    """
    length = max(max_positions, rope.original_max_positions) / rope.original_max_positions
    return float(rope.theta * (rope.factor * length - (rope.factor - 1)) ** (head_dim / (head_dim - 2)))


def _smooth_llama3(
    base: Tensor,  # [head_dim / 2]
    rope: RopeConfig,
) -> Tensor:  # [head_dim / 2]
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_positions * base / (2 * math.pi)  # over the original length
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _ramp_yarn(
    base: Tensor,  # [head_dim / 2]
    rope: RopeConfig,
    head_dim: int,
) -> Tensor:  # [head_dim / 2]
    """Dimensions with more than beta_fast turns are kept, those with fewer than beta_slow stretched (YaRN)."""
    low, high = (_yarn_dimension(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    stretched = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)


def _yarn_dimension(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The (fractional) pair of dimensions that makes `turns` turns over the original length."""
    return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
