"""Rejection sampling gives the target's distribution whatever is proposed, and the same test sees wrong rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.columns import Ints, SamplingColumns
from engine.sampling.drafts import Drafts, lay_out
from engine.sampling.processing import SampleBatch
from engine.sampling.proposals import certain_proposals, unpack_distributions
from engine.sampling.sampler import MAX_PROPOSED, Sampler
from engine.sampling.verification import Verification
from kernels.ops.sampling import rejection as ops
from kernels.provider import select_kernels
from shared.messages.steps import DraftDistribution
from shared.packing import unpack_tokens
from shared.requests.sampling import SamplingParams
from tests.engine.chi_square import p_value
from tests.engine.sampling.test_sampler import plain_support

VOCAB = 16
NUM_SAMPLES = 60_000
SAMPLER = Sampler(select_kernels(torch.device("cpu"), torch.float32).sampling)
TRUNCATION: dict[str, dict[str, Any]] = {"all": {}, "top-p": {"top_p": 0.8}, "top-k": {"top_k": 5}}
PARAMS = {
    f"{temperature}-{name}": SamplingParams(temperature=temperature, **truncation)
    for temperature in (0.5, 1.0, 1.5)
    for name, truncation in TRUNCATION.items()
}
SOME = {name: PARAMS[name] for name in ("0.5-top-k", "1.0-all", "1.5-top-p")}
Probs = NDArray[np.float64]


def verify(logits: Tensor, batch: SampleBatch, drafts: Drafts) -> tuple[Ints, Ints]:
    """Tokens of all positions, and accepted drafts of each sequence."""
    verdict = Verification(SAMPLER).verify(logits, batch, drafts)
    return verdict.tokens.numpy(), verdict.accepted.numpy()


def chain(seed: int) -> Tensor:
    """A model whose logits depend on the last token alone [VOCAB, VOCAB]; two tokens of each row are equally likely."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[:, 9] = logits[:, 4]
    return logits


TARGET = chain(1)
DRAFT = TARGET * 0.6 + chain(2) * 0.7  # akin, as a draft should be


def exact(
    logits: Tensor,  # [VOCAB]
    params: SamplingParams,
) -> Probs:  # [VOCAB]
    scaled = (logits.double() / (params.temperature or 1.0)).tolist()
    support = sorted(plain_support(scaled, params))
    probs: Probs = np.zeros(len(scaled))
    probs[support] = np.exp(np.array(scaled)[support] - max(scaled))
    probs /= probs.sum()
    return probs


class Crowd:
    """Many sequences with the same parameters and a seed each, whose histories end in the same token."""

    def __init__(self, params: SamplingParams, *, start: int = 3, first_seed: int = 0) -> None:
        self.columns = SamplingColumns(NUM_SAMPLES)
        self.columns.fill(0, 1, params, 0, [])
        for column in (self.columns.temperature, self.columns.top_k, self.columns.top_p, self.columns.min_p):
            column[:] = column[0]
        self.columns.seeds[:] = np.arange(NUM_SAMPLES) + first_seed
        self.start = start
        self.rows = np.arange(NUM_SAMPLES)

    def batch(self, position: int, repeats: int = 1) -> SampleBatch:
        """Of each sequence `repeats` positions from this one on."""
        rows = np.repeat(self.rows, repeats)
        positions = np.tile(np.arange(position, position + repeats), len(self.rows))
        return SampleBatch(rows, positions, torch.zeros(len(self.rows), 8, dtype=torch.int64), self.columns)

    def propose(self, num_drafts: int) -> tuple[Ints, list[DraftDistribution]]:
        """[NUM_SAMPLES, num_drafts] draft tokens, and what each was drawn from, in the order of a plan."""
        last = torch.full((NUM_SAMPLES,), self.start)
        drafts, drawn_from = [], []
        for place in range(num_drafts):
            last, distributions = SAMPLER.propose(DRAFT[last], self.batch(1 + place))
            drafts.append(last.numpy())
            drawn_from.append(distributions)
        order = [drawn_from[place][row] for row in range(NUM_SAMPLES) for place in range(num_drafts)]
        return np.stack(drafts, 1), order

    def verify(
        self,
        drafts: Ints,  # [NUM_SAMPLES, num_drafts]
        distributions: list[DraftDistribution],
    ) -> tuple[Ints, Ints]:  # tokens of all positions [NUM_SAMPLES, num_drafts + 1], accepted [NUM_SAMPLES]
        num_drafts = drafts.shape[1]
        counts, flat = np.full(NUM_SAMPLES, num_drafts), drafts.reshape(-1)
        proposals = unpack_distributions(distributions, flat, VOCAB) if distributions else certain_proposals(flat)
        starts = np.full((NUM_SAMPLES, 1), self.start)
        before = torch.from_numpy(np.concatenate((starts, drafts), axis=1).reshape(-1))
        tokens, accepted = verify(TARGET[before], self.batch(1, num_drafts + 1), lay_out(counts, flat, proposals))
        return tokens.reshape(NUM_SAMPLES, num_drafts + 1), accepted


def first_tokens(params: SamplingParams, *, model: bool) -> tuple[Ints, Ints]:
    """Counts of the first token that comes out, [kinds of draft, VOCAB], and accepted drafts of all sequences."""
    crowd = Crowd(params)
    if model:
        tokens, accepted = crowd.verify(*crowd.propose(1))
        return np.bincount(tokens[:, 0], minlength=VOCAB)[None], accepted
    drafts = crowd.rows[:, None] % VOCAB
    tokens, accepted = crowd.verify(drafts, [])
    return np.bincount(drafts[:, 0] * VOCAB + tokens[:, 0], minlength=VOCAB**2).reshape(VOCAB, VOCAB), accepted


def fit(params: SamplingParams, *, model: bool) -> float:
    counts, _ = first_tokens(params, model=model)
    probs = exact(TARGET[3], params) * np.ones((len(counts), 1)) / len(counts)
    return p_value(counts.reshape(-1), probs.reshape(-1))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_distribution_is_the_target_s_whatever_is_proposed(params: SamplingParams) -> None:
    assert fit(params, model=False) > 0.01


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_of_a_model_s_drafts_as_much_is_accepted_as_theory_says(params: SamplingParams) -> None:
    """The distribution is the target's, and what is accepted the sum of min(p, q): nothing accepts more.  Five standard
    deviations."""
    counts, accepted = first_tokens(params, model=True)
    assert p_value(counts.reshape(-1), exact(TARGET[3], params)) > 0.01
    wanted = float(np.minimum(exact(TARGET[3], params), exact(DRAFT[3], params)).sum())
    assert abs(float(accepted.mean()) - wanted) < 5 * (wanted * (1 - wanted) / NUM_SAMPLES) ** 0.5 + 1e-6
    assert 0.2 < wanted < 0.99


def accept_always(*arguments: Tensor) -> Tensor:
    return torch.ones_like(arguments[3], dtype=torch.bool)


def accept_where_p_is_larger(
    values: Tensor, cut: Tensor, last_tied: Tensor, draft_ids: Tensor, proposed: Tensor, keys: tuple[Tensor, Tensor]
) -> Tensor:
    """The honest rule over a part of the proposal's probability: accepted where even nearly all of it is below p."""
    token_ids = torch.arange(values.shape[1])
    kept = (values > cut[:, None]) | ((values == cut[:, None]) & (token_ids <= last_tied[:, None]))
    probs = torch.softmax(values.double().masked_fill(~kept, float("-inf")), dim=1)
    return proposed < probs.gather(1, draft_ids[:, None])[:, 0]


def recover_from_p(
    values: Tensor, cut: Tensor, last_tied: Tensor, owners: Tensor, token_ids: Tensor, probs: Tensor
) -> Tensor:
    return ops.log_residual(values, cut, last_tied, owners, token_ids, torch.zeros_like(probs))


@pytest.mark.parametrize("params", SOME.values(), ids=SOME)
@pytest.mark.parametrize("model", [True, False], ids=["model", "certain"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [("accepts", accept_always), ("accepts", accept_where_p_is_larger), ("log_residual", recover_from_p)],
)
def test_a_wrong_rule_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, rule: Callable[..., Tensor], model: bool, params: SamplingParams
) -> None:
    kernels = SAMPLER.kernels
    wrong = replace(kernels, accepts=rule) if name == "accepts" else replace(kernels, log_residual=rule)
    monkeypatch.setattr(SAMPLER, "kernels", wrong)
    assert fit(params, model=model) < 1e-6


@pytest.mark.parametrize("params", [PARAMS["1.0-all"], PARAMS["1.5-top-p"]])
def test_two_tokens_together(params: SamplingParams) -> None:
    """Three drafts; where the first is refused, the second token comes from the step after, with drafts of its own."""
    crowd = Crowd(params)
    tokens, accepted = crowd.verify(*crowd.propose(3))
    first, second = tokens[:, 0], tokens[:, 1].copy()
    again = np.flatnonzero(accepted == 0)
    after = crowd.batch(2)
    rest = SampleBatch(after.rows[again], after.lengths[again], after.tokens, after.columns)
    drafts = torch.from_numpy(first[again])
    proposed, distributions = SAMPLER.propose(DRAFT[drafts], rest)
    twice = SampleBatch(
        np.repeat(rest.rows, 2), np.repeat(rest.lengths, 2) + np.tile([0, 1], len(again)), after.tokens, after.columns
    )
    before = torch.stack((drafts, proposed), 1).reshape(-1)
    flat = proposed.numpy()
    layout = lay_out(np.ones(len(again), np.int64), flat, unpack_distributions(distributions, flat, VOCAB))
    second[again] = verify(TARGET[before], twice, layout)[0][::2]
    counts = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    probs = exact(TARGET[3], params)[:, None] * np.stack([exact(row, params) for row in TARGET])
    assert len(again) > 1000 and int((accepted == 3).sum()) > 1000
    assert p_value(counts, probs.reshape(-1)) > 0.01


def test_the_token_behind_all_drafts() -> None:
    """Of sequences whose three drafts were all accepted, the fourth token given the third."""
    params = PARAMS["1.0-top-k"]
    crowd = Crowd(params)
    tokens, accepted = crowd.verify(*crowd.propose(3))
    whole = tokens[accepted == 3]
    third = int(np.bincount(whole[:, 2]).argmax())
    counts = np.bincount(whole[whole[:, 2] == third][:, 3], minlength=VOCAB)
    assert counts.sum() > 1000
    assert p_value(counts, exact(TARGET[third], params)) > 0.01


def small_batch(params: list[SamplingParams], lengths: list[int] | None = None) -> SampleBatch:
    columns = SamplingColumns(len(params))
    for row, one in enumerate(params):
        columns.fill(row, 1, one, 50 + row, [2])
    positions = np.array(lengths or [1] * len(params))
    return SampleBatch(np.arange(len(params)), positions, torch.zeros(len(params), 9, dtype=torch.int64), columns)


MIXED = [SamplingParams(temperature=t, top_p=p, top_k=k) for t in (0.0, 0.7, 1.3) for p in (0.9, 1.0) for k in (0, 30)]


def wide_logits(num_rows: int) -> Tensor:  # [num_rows, 1000], with many equals
    return (torch.randn(num_rows, 1000, generator=torch.Generator().manual_seed(4)) * 3).round()


def test_what_is_proposed() -> None:
    logits = wide_logits(len(MIXED))
    token_ids, distributions = SAMPLER.propose(logits.clone(), small_batch(MIXED))
    for row, (token, one) in enumerate(zip(token_ids.tolist(), distributions, strict=True)):
        ids, probs = unpack_tokens(one.token_ids), np.frombuffer(one.probs, "<f4")
        if MIXED[row].greedy:
            assert ids == [token] == [int(logits[row].argmax())] and probs.tolist() == [1.0]
            continue
        wanted = exact(logits[row], MIXED[row])
        kept = sorted(np.argsort(-wanted, kind="stable")[: min(MAX_PROPOSED, np.count_nonzero(wanted))].tolist())
        assert token in ids
        assert ids == kept, "of equals the lowest ids"
        np.testing.assert_allclose(probs, wanted[kept] / wanted[kept].sum(), rtol=1e-5)


def test_proposals_are_alone_as_in_the_batch() -> None:
    logits, batch = wide_logits(len(MIXED)), small_batch(MIXED)
    token_ids, distributions = SAMPLER.propose(logits.clone(), batch)
    for row in range(len(MIXED)):
        one = SampleBatch(batch.rows[row : row + 1], batch.lengths[row : row + 1], batch.tokens, batch.columns)
        found, alone = SAMPLER.propose(logits[row : row + 1].clone(), one)
        assert (found.tolist(), alone) == ([int(token_ids[row])], [distributions[row]])


def test_a_proposal_is_drawn_from_its_distribution() -> None:
    crowd = Crowd(PARAMS["1.0-top-p"])
    drafts, distributions = crowd.propose(1)
    one = distributions[0]
    probs = np.zeros(VOCAB)
    probs[unpack_tokens(one.token_ids)] = np.frombuffer(one.probs, "<f4")
    np.testing.assert_allclose(probs, exact(DRAFT[3], PARAMS["1.0-top-p"]), rtol=1e-5)
    assert p_value(np.bincount(drafts[:, 0], minlength=VOCAB), probs) > 0.01


def test_drafts_are_not_what_the_target_would_take() -> None:
    """With the target's own noise a draft would know what it will be tested against."""
    crowd = Crowd(PARAMS["1.0-all"])
    drafts, _ = crowd.propose(1)
    plain = SAMPLER.sample(DRAFT[torch.full((NUM_SAMPLES,), 3)], crowd.batch(1)).numpy()
    joint = np.bincount(drafts[:, 0] * VOCAB + plain, minlength=VOCAB**2)
    probs = exact(DRAFT[3], PARAMS["1.0-all"])
    assert p_value(joint, np.outer(probs, probs).reshape(-1)) > 0.01


def test_rejection_alone_as_in_the_batch() -> None:
    """Rows that sample, greedy ones, ones without drafts: each as it is by itself."""
    counts = np.array([row % 4 for row in range(len(MIXED))])
    batch, generator = small_batch(MIXED), np.random.default_rng(0)
    rows = np.repeat(batch.rows, counts + 1)
    lengths = 1 + np.concatenate([np.arange(count + 1) for count in counts])
    logits = wide_logits(len(rows))
    drafts = logits.argmax(1).numpy()
    drafts[generator.random(len(drafts)) < 0.3] += 1
    starts = np.cumsum(counts + 1) - (counts + 1)
    parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    flat = np.concatenate([drafts[part] for part in parts])
    whole = SampleBatch(rows, lengths, batch.tokens, batch.columns)
    tokens, accepted = verify(logits.clone(), whole, lay_out(counts, flat, certain_proposals(flat)))
    assert 0 < accepted.sum() < counts.sum()
    for row, part in enumerate(parts):
        some = slice(part.start, part.stop + 1)
        one = SampleBatch(rows[some], lengths[some], batch.tokens, batch.columns)
        if counts[row]:
            layout = lay_out(counts[row : row + 1], drafts[part], certain_proposals(drafts[part]))
            found, taken = verify(logits[some].clone(), one, layout)
        else:
            found, taken = SAMPLER.sample(logits[some].clone(), one).numpy(), np.zeros(1, np.int64)
        assert taken.tolist() == [accepted[row]]
        end = part.start + int(accepted[row]) + 1
        assert found[: end - part.start].tolist() == tokens[part.start : end].tolist()


def test_where_nothing_is_left() -> None:
    """A request that forbids everything, and a model that gives no numbers, get some token."""
    nothing = SamplingParams(temperature=1.0, allowed_token_ids=[2], min_tokens=5, top_p=0.9)
    for params, value in ((nothing, 0.0), (SamplingParams(), float("nan")), (SamplingParams(), float("-inf"))):
        batch = small_batch([params])
        two = SampleBatch(np.zeros(2, np.int64), np.array([1, 2]), batch.tokens, batch.columns)
        layout = lay_out(np.array([1]), np.array([7]), certain_proposals(np.array([7])))
        tokens, accepted = verify(torch.full((2, 1000), value), two, layout)
        assert accepted.tolist() == [0] and ((tokens >= 0) & (tokens < 1000)).all()
        assert len(SAMPLER.propose(torch.full((1, 1000), value), batch)[1]) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 10, 999])
def test_what_a_broken_draft_proposes_is_refused_by_no_worker(count: int, value: float) -> None:
    """Some logits of a draft are not finite, as where float16 overflows: that ends no worker."""
    wishes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
    params = [SamplingParams(**wish) for wish in wishes]
    logits = wide_logits(len(params) + 1)
    logits[: len(params), -count:] = value
    token_ids, distributions = SAMPLER.propose(logits, small_batch([*params, SamplingParams()]))
    found = unpack_distributions(distributions, token_ids.numpy(), 1000)
    assert (found.own > 0).all() and len(found.owners) > len(params) + 1, "the last row is sound"
