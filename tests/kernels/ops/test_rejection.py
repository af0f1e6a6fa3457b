"""Rejection sampling's two ops against the same in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.ops.sampling import rejection
from kernels.ops.sampling.noise import row_keys, uniform_noise
from kernels.ops.sampling.rejection import accepts, log_residual

ROWS, VOCAB = 60, 40
NEVER = float("-inf")


@pytest.fixture(params=[1, 7 * VOCAB, 1 << 18], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed one by one, some at a time, all at once."""
    monkeypatch.setattr(rejection, "BLOCK", request.param)


@pytest.fixture
def values() -> Tensor:  # [ROWS, VOCAB] with equals, and with tokens that are masked
    values = (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2).round()
    values[::3, ::5] = NEVER
    return values


def bounds() -> tuple[Tensor, Tensor]:
    """Cuts at all heights, in the middle of equals and not."""
    cut = torch.arange(ROWS).remainder(5).float() - 3
    cut[::7] = NEVER
    last_tied = torch.where(torch.arange(ROWS) % 2 == 0, VOCAB, VOCAB // 2)
    return cut, last_tied


def plain_probs(values: list[float], cut: float, last_tied: int) -> list[float]:
    weights = [
        math.exp(value) if value > cut or (value == cut and token <= last_tied) else 0.0
        for token, value in enumerate(values)
    ]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def test_accepts(values: Tensor) -> None:
    cut, last_tied = bounds()
    draft_ids = torch.where(torch.arange(ROWS) % 3 == 0, torch.arange(ROWS) * 7 % VOCAB, values.argmax(1))
    proposed = torch.linspace(0.01, 0.7, ROWS, dtype=torch.float64)
    keys = row_keys(torch.arange(ROWS), torch.arange(ROWS) + 5)
    uniform = uniform_noise(*keys, draft_ids).tolist()
    found = accepts(values, cut, last_tied, draft_ids, proposed, keys).tolist()
    wanted = []
    for row in range(ROWS):
        probs = plain_probs(values[row].tolist(), float(cut[row]), int(last_tied[row]))
        wanted.append(uniform[row] < probs[int(draft_ids[row])] / float(proposed[row]))
    assert found == wanted
    assert 5 < sum(found) < ROWS - 5


def test_log_residual(values: Tensor) -> None:
    cut, last_tied = bounds()
    owners = torch.arange(ROWS).repeat_interleave(3)
    token_ids = torch.arange(3 * ROWS) * 11 % VOCAB
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).repeat(ROWS)
    found = log_residual(values, cut, last_tied, owners, token_ids, probs)
    assert found.dtype == torch.float32
    for row in range(ROWS):
        wanted = plain_probs(values[row].tolist(), float(cut[row]), int(last_tied[row]))
        for entry in range(3 * row, 3 * row + 3):
            wanted[int(token_ids[entry])] -= float(probs[entry])
        logs = [math.log(prob) if prob > 0 else NEVER for prob in wanted]
        torch.testing.assert_close(found[row], torch.tensor(logs), atol=1e-5, rtol=1e-5)


def test_the_same_distribution_is_always_accepted_and_leaves_next_to_nothing(values: Tensor) -> None:
    cut, last_tied = bounds()
    triples = zip(values.tolist(), cut.tolist(), last_tied.tolist(), strict=True)
    probs = torch.tensor([plain_probs(*triple) for triple in triples], dtype=torch.float64)
    draft_ids = values.argmax(1)
    keys = row_keys(torch.arange(ROWS), torch.arange(ROWS))
    assert bool(accepts(values, cut, last_tied, draft_ids, probs.gather(1, draft_ids[:, None])[:, 0], keys).all())
    owners, token_ids = probs.nonzero(as_tuple=True)
    left = log_residual(values, cut, last_tied, owners, token_ids, probs[owners, token_ids])
    assert float(left.exp().sum(1).max()) < 1e-5


def test_rows_without_anything() -> None:
    values = torch.full((3, VOCAB), NEVER)
    values[1] = float("nan")
    values[2, 4] = 0.0
    bounds = (torch.full((3,), NEVER), torch.full((3,), VOCAB))
    draft_ids, ones = torch.full((3,), 4), torch.ones(3, dtype=torch.float64)
    keys = row_keys(torch.arange(3), torch.arange(3))
    assert accepts(values, *bounds, draft_ids, ones, keys).tolist() == [False, False, True]
    assert not bool((log_residual(values, *bounds, torch.arange(3), draft_ids, ones) > NEVER).any())
