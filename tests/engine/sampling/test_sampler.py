"""The sampler against a plain one in Python floats, and against the distributions that it must have."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.columns import SamplingColumns
from engine.sampling.logprobs import read_scores, score
from engine.sampling.processing import SampleBatch, process_logits
from engine.sampling.sampler import Sampler
from kernels.ops.sampling.noise import gumbel_noise, row_keys
from kernels.provider import select_kernels
from shared.requests.sampling import SamplingParams

VOCAB = 300
NEVER = float("-inf")
KERNELS = select_kernels(torch.device("cpu"), torch.float32).sampling


class Rows:
    """Histories and parameters, one row each."""

    def __init__(self, params: list[SamplingParams], histories: list[list[int]], num_prompt: int = 2) -> None:
        self.params, self.histories, self.num_prompt = params, histories, num_prompt
        self.columns = SamplingColumns(len(params))
        self.tokens = torch.zeros(len(params), max(map(len, histories)) + 1, dtype=torch.int64)
        for row, (one, history) in enumerate(zip(params, histories, strict=True)):
            self.columns.fill(row, num_prompt, one, 1000 + row, [2])
            self.tokens[row, : len(history)] = torch.tensor(history)

    def batch(self, rows: list[int] | None = None) -> SampleBatch:
        chosen = list(range(len(self.params))) if rows is None else rows
        lengths = [len(self.histories[row]) for row in chosen]
        return SampleBatch(np.array(chosen), np.array(lengths), self.tokens, self.columns)


def plain_process(logits: list[float], params: SamplingParams, history: list[int], num_prompt: int) -> list[float]:
    out = list(logits)
    if params.allowed_token_ids:
        out = [value if token in params.allowed_token_ids else NEVER for token, value in enumerate(out)]
    for word in params.bad_words_token_ids:
        if len(word) == 1 or history[-(len(word) - 1) :] == word[:-1]:
            out[word[-1]] = NEVER
    if len(history) - num_prompt < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else [2])]:
            out[token] = NEVER
    for token, bias in params.logit_bias.items():
        out[token] += max(-100.0, min(100.0, bias))
    for token in set(history):
        penalty = params.repetition_penalty or 1.0
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(history[num_prompt:]):
        count = history[num_prompt:].count(token)
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


def plain_support(scaled: list[float], params: SamplingParams) -> set[int]:
    """Tokens that min_p, top_k and top_p leave."""
    peak = max(scaled)
    kept = [token for token in range(len(scaled)) if scaled[token] > NEVER]
    if params.min_p:
        kept = [token for token in kept if math.exp(scaled[token] - peak) >= params.min_p]
    if params.top_k:
        least = sorted((scaled[token] for token in kept), reverse=True)[: params.top_k][-1]
        kept = [token for token in kept if scaled[token] >= least]
    order = sorted(kept, key=lambda token: (-scaled[token], token))
    total = math.fsum(math.exp(scaled[token] - peak) for token in order)
    support, mass = set(), 0.0
    for token in order:
        support.add(token)
        mass += math.exp(scaled[token] - peak)
        if params.top_p is not None and mass >= params.top_p * total:
            break
    return support


def plain_choice(scaled: list[float], support: set[int], seed: int, position: int) -> int:
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    noise = gumbel_noise(*keys, torch.arange(len(scaled))).tolist()
    return max(sorted(support), key=lambda token: scaled[token] + noise[token])


def random_params(generator: random.Random) -> SamplingParams:
    def some(value: Any, default: Any) -> Any:
        return value if generator.random() < 0.4 else default

    return SamplingParams(
        temperature=generator.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
        top_k=some(generator.randrange(1, 30), 0),
        top_p=some(generator.choice([0.1, 0.5, 0.9, 0.999]), 1.0),
        min_p=some(generator.choice([0.01, 0.1, 1.0]), 0.0),
        repetition_penalty=some(generator.choice([0.8, 1.3]), 1.0),
        frequency_penalty=some(generator.uniform(-2, 2), 0.0),
        presence_penalty=some(generator.uniform(-2, 2), 0.0),
        logit_bias=some({generator.randrange(VOCAB): generator.uniform(-200, 200) for _ in range(3)}, {}),
        allowed_token_ids=some(generator.sample(range(VOCAB), 20), None),
        bad_words_token_ids=some([[5], [7, 8], [9, 7, 8]], []),
        min_tokens=some(8, 0),
        stop_token_ids=some([11, 12], []),
        ignore_eos=some(True, False),
    )


def spread_logits(num_rows: int, seed: int, scale: float = 4.0) -> Tensor:  # [num_rows, VOCAB]
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(scope="module")
def mixed() -> tuple[Rows, Tensor]:
    generator = random.Random(5)
    params = [random_params(generator) for _ in range(120)]
    histories = [[generator.randrange(14) for _ in range(generator.randrange(3, 12))] for _ in params]
    return Rows(params, histories), spread_logits(120, seed=1)


def test_processed_logits(mixed: tuple[Rows, Tensor]) -> None:
    rows, logits = mixed
    found = logits.clone()
    process_logits(found, rows.batch())
    for row, params in enumerate(rows.params):
        wanted = plain_process(logits[row].tolist(), params, rows.histories[row], rows.num_prompt)
        torch.testing.assert_close(found[row], torch.tensor(wanted), atol=1e-4, rtol=1e-5)


def test_tokens_of_a_mixed_batch(mixed: tuple[Rows, Tensor]) -> None:
    rows, logits = mixed
    found = Sampler(KERNELS).sample(logits.clone(), rows.batch()).tolist()
    processed = logits.clone()
    process_logits(processed, rows.batch())
    for row, params in enumerate(rows.params):
        if params.greedy:
            assert found[row] == int(processed[row].argmax())
            continue
        assert params.temperature is not None
        scaled = (processed[row] / params.temperature).tolist()
        support = plain_support(scaled, params)
        assert found[row] == plain_choice(scaled, support, 1000 + row, len(rows.histories[row])), params


def test_alone_as_in_the_batch(mixed: tuple[Rows, Tensor]) -> None:
    rows, logits = mixed
    sampler = Sampler(KERNELS)
    together = sampler.sample(logits.clone(), rows.batch()).tolist()
    alone = [int(sampler.sample(logits[row : row + 1].clone(), rows.batch([row]))) for row in range(len(together))]
    assert alone == together


def draw(params: SamplingParams, logits: Tensor, num_draws: int) -> np.ndarray[Any, Any]:
    """The same row drawn with many seeds: counts [vocab_size]."""
    columns = SamplingColumns(num_draws)
    for row in range(num_draws):
        columns.fill(row, 1, params, 7_000_000 + row, [])
    batch = SampleBatch(
        np.arange(num_draws), np.ones(num_draws, np.int64), torch.zeros(num_draws, 2, dtype=torch.int64), columns
    )
    token_ids = Sampler(KERNELS).sample(logits.repeat(num_draws, 1), batch)
    return np.bincount(token_ids.numpy(), minlength=logits.shape[-1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.3, min_p=0.02, top_k=8, top_p=0.9),
    ],
)
def test_frequencies_are_the_distribution(params: SamplingParams) -> None:
    """Chi-square of 20,000 draws over a vocabulary of 12; chance exceeds the bound less than once in 10,000."""
    logits = torch.linspace(3, -1, 12)
    counts = draw(params, logits, 20_000)
    scaled = (logits / (params.temperature or 1.0)).tolist()
    support = sorted(plain_support(scaled, params))
    assert set(np.flatnonzero(counts)) <= set(support)
    weights = np.exp(np.array([scaled[token] for token in support]))
    expected = weights / weights.sum() * counts.sum()
    freedom = len(support) - 1
    statistic = float(((counts[support] - expected) ** 2 / expected).sum())
    rarity = math.log(10_000)
    assert statistic < freedom + 2 * math.sqrt(freedom * rarity) + 2 * rarity  # Laurent and Massart (2000), lemma 1


def test_a_flat_row_over_a_large_vocabulary() -> None:
    """Nothing can be pruned, and every token can be drawn."""
    counts = draw(SamplingParams(temperature=1.0), torch.zeros(40_000), 16)
    assert counts.sum() == 16
    assert counts.max() <= 2


def test_ties_at_the_boundaries() -> None:
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0, 5.0, 0.0])
    greedy = Rows([SamplingParams(temperature=0.0)], [[0]])
    assert Sampler(KERNELS).sample(logits[None].clone(), greedy.batch()).tolist() == [1]
    assert set(np.flatnonzero(draw(SamplingParams(top_k=1), logits, 300))) == {1, 2, 3, 4}
    assert set(np.flatnonzero(draw(SamplingParams(top_p=0.4), logits, 300))) == {1, 2}
    assert set(np.flatnonzero(draw(SamplingParams(top_p=1e-9), logits, 50))) == {1}


def test_wide_nuclei_over_a_large_vocabulary() -> None:
    """Boundaries beyond the first look at the most likely tokens."""
    logits = torch.linspace(0, -3, 9000)
    params = [SamplingParams(top_p=p) for p in (0.05, 0.5, 0.99, 0.9999999)]
    rows = Rows(params, [[0]] * len(params))
    found = Sampler(KERNELS).sample(logits.repeat(len(params), 1), rows.batch()).tolist()
    for row, one in enumerate(params):
        scaled = logits.tolist()
        assert found[row] == plain_choice(scaled, plain_support(scaled, one), 1000 + row, 1)


def test_a_row_without_any_token_left() -> None:
    """A request can forbid everything; it gets a token all the same, and its neighbour is not harmed."""
    nothing = SamplingParams(temperature=1.0, allowed_token_ids=[2], min_tokens=5, top_p=0.9, top_k=3, min_p=0.1)
    rows = Rows([nothing, SamplingParams(temperature=0.0)], [[0, 1], [0, 1]])
    assert Sampler(KERNELS).sample(spread_logits(2, seed=3), rows.batch()).shape == (2,)


def test_seeds_of_64_bits() -> None:
    columns = SamplingColumns(1)
    for seed in (-(2**63), 2**63 - 1, 2**63 + 5, 0):
        columns.fill(0, 1, SamplingParams(), seed, [])
        assert int(columns.seeds[0]) % 2**64 == seed % 2**64


def test_logprobs() -> None:
    logits = spread_logits(3, seed=4)
    chosen = torch.tensor([int(logits[0].argmax()), int(logits[1].argsort()[-4]), 17])
    counts = np.array([2, 0, -1])
    found = read_scores(score(logits, chosen, counts), counts, VOCAB)
    wanted = torch.log_softmax(logits.double(), dim=1)
    assert [len(position.token_ids) for position in found] == [3, 1, VOCAB + 1]
    assert [position.rank for position in found[:2]] == [1, 4]
    for row, position in enumerate(found):
        assert position.token_ids[0] == int(chosen[row])
        assert position.token_ids[1:] == wanted[row].argsort(descending=True)[: len(position.token_ids) - 1].tolist()
        assert position.logprobs == pytest.approx(wanted[row, position.token_ids].tolist())
    assert math.fsum(math.exp(value) for value in found[2].logprobs[1:]) == pytest.approx(1.0)


def test_logprobs_of_named_tokens() -> None:
    logits = spread_logits(2, seed=4)
    named = [None, np.array([3, 17, 3])]
    scores = score(logits, torch.tensor([5, 17]), np.array([1, 3]), named)
    wanted = torch.log_softmax(logits.double(), dim=1)
    likeliest, found = read_scores(scores, np.array([1, 3]), VOCAB)
    assert likeliest.token_ids == [5, int(wanted[0].argmax())]
    assert found.token_ids == [17, 3, 17, 3]
    assert found.logprobs == pytest.approx(wanted[1, [17, 3, 17, 3]].tolist())


def test_rank_counts_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert score(logits, torch.tensor([2]), np.array([0])).ranks.tolist() == [2]


def test_a_broken_model_does_not_break_the_sampler() -> None:
    """Logits that are no numbers give some token, as a greedy argmax would."""
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5), SamplingParams()]
    rows = Rows(params, [[0]] * len(params))
    for value in (float("nan"), float("inf"), NEVER):
        found = Sampler(KERNELS).sample(torch.full((4, 5000), value), rows.batch())
        assert bool(((found >= 0) & (found < 5000)).all())
