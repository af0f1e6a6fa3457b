"""The counter-based noise: bits that may never change, and the distribution that they must have."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.ops.sampling.noise import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    MAX_NOISE,
    MIN_NOISE,
    RECOVER_STREAM,
    UNIT,
    gumbel_noise,
    row_keys,
    token_bits,
    uniform_noise,
)

GOLDEN: list[tuple[int, int, int, int]] = [
    # seed, position, token id, hash
    (0, 0, 0, 0x25473480),
    (0, 0, 1, 0xA771843E),
    (0, 1, 0, 0x0B52043B),
    (1, 0, 0, 0xD6AF7A0E),
    (42, 17, 49151, 0xA03E081C),
    (-1, 2048, 151935, 0xC2EA1EB4),
    (9223372036854775807, 131071, 7, 0x23DC8E8E),
    (-9223372036854775808, 3, 2147483647, 0xA9E681CE),
    (1311768467463790320, 1000, 31999, 0x2586B61F),
]


def plain_mix(word: int) -> int:
    word = (word ^ (word >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ (word >> 16)


def plain_bits(seed: int, position: int, token_id: int) -> int:
    """The definition once more, in Python integers."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first = plain_mix((plain_mix((plain_mix(low ^ 0x9E3779B9) + high) & 0xFFFFFFFF) + position) & 0xFFFFFFFF)
    second = plain_mix(plain_mix((plain_mix(high ^ 0x7F4A7C15) + low) & 0xFFFFFFFF) ^ position)
    return plain_mix((plain_mix(first ^ (token_id * 0x9E3779B1 & 0xFFFFFFFF)) + second) & 0xFFFFFFFF)


def bits(seed: int, position: int, token_id: int) -> int:
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    return int(token_bits(*keys, torch.tensor([token_id])))


@pytest.mark.parametrize(("seed", "position", "token_id", "expected"), GOLDEN)
def test_golden_bits(seed: int, position: int, token_id: int, expected: int) -> None:
    assert bits(seed, position, token_id) == expected == plain_bits(seed, position, token_id)


def test_bounds() -> None:
    assert -2.86 < MIN_NOISE < -2.85
    assert 17.3 < MAX_NOISE < 17.4
    assert math.isclose(MAX_NOISE, -math.log(-math.log(1 - 0.5 * UNIT)), rel_tol=1e-9)


def sample_noise(num_rows: int, num_tokens: int) -> torch.Tensor:  # [num_rows, num_tokens]
    """Rows are consecutive positions of one seed: the case in which a weak hash would show."""
    first, second = row_keys(torch.full((num_rows,), 42), torch.arange(num_rows))
    tokens = torch.arange(num_tokens).repeat(num_rows)
    noise = gumbel_noise(first.repeat_interleave(num_tokens), second.repeat_interleave(num_tokens), tokens)
    return noise.view(num_rows, num_tokens)


def test_distribution() -> None:
    """Kolmogorov-Smirnov over a million draws, moments, and no correlation of neighbours in either direction."""
    noise = sample_noise(1000, 1000)
    assert bool((noise >= MIN_NOISE).all()) and bool((noise <= MAX_NOISE).all())
    ordered = torch.exp(-torch.exp(-noise.flatten())).sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert float((ordered - steps).abs().max()) < 2.2 / math.sqrt(len(ordered))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.006)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    for one, other in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[1:, 1:], noise[:-1, :-1])):
        assert abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])) < 0.005


def test_seeds_positions_and_tokens_all_matter() -> None:
    points = [(1, 5, 9), (2, 5, 9), (1 << 32, 5, 9), (1, 6, 9), (5, 1, 9), (1, 5, 10), (-1, 5, 9)]
    assert len({bits(*point) for point in points}) == len(points)


def test_streams_have_nothing_to_do_with_each_other() -> None:
    """The noise of one seed and position in each stream: uniform, and uncorrelated with that of the others."""
    streams = torch.tensor([0, ACCEPT_STREAM, RECOVER_STREAM, DRAFT_STREAM])
    assert int(streams.max()) < 2**63, "a seed with it is an int64 still"
    seeds, tokens = torch.arange(200_000), torch.arange(200_000) % 97
    drawn = torch.stack([uniform_noise(*row_keys(seeds ^ stream, tokens + 3), tokens) for stream in streams])
    assert drawn.mean(1).tolist() == pytest.approx([0.5] * 4, abs=0.003)
    others = torch.corrcoef(drawn) - torch.eye(4)
    assert float(others.abs().max()) < 0.01
