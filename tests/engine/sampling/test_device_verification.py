"""Drafts that are verified where the tokens are: the same tokens, and histories that the next step can read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.columns import Ints, SamplingColumns
from engine.sampling.drafts import Drafts, lay_out
from engine.sampling.processing import SampleBatch
from engine.sampling.proposals import Proposals, certain_proposals
from engine.sampling.sampler import Sampler
from engine.sampling.verification import Verification
from kernels.interface import reference_kernels
from shared.requests.sampling import SamplingParams
from tests.engine.sampling.on_host import verify_on_host

VOCAB, LONGEST = 40, 24
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5),
]


@dataclass(frozen=True)
class Step:
    """Sequences of every kind, with none to four drafts each."""

    logits: Tensor  # [num_positions, VOCAB]
    batch: SampleBatch
    drafts: Drafts
    rows: Ints  # [num_seqs]
    lengths: Ints  # [num_seqs]

    def verified(self, on_device: bool) -> tuple[list[list[int]], Tensor]:
        """The tokens that each sequence takes, and the histories, which the device writes itself."""
        sampler = Sampler(reference_kernels().sampling)
        histories = self.batch.tokens.clone()
        batch = SampleBatch(self.batch.rows, self.batch.lengths, histories, self.batch.columns)
        tokens: Any
        accepted: Any
        if on_device:
            verdict = Verification(sampler).verify(self.logits.clone(), batch, self.drafts)
            tokens, accepted = verdict.tokens, verdict.accepted
        else:
            tokens, accepted = verify_on_host(sampler, self.logits.clone(), batch, self.drafts)
        ends = zip(self.drafts.starts.tolist(), accepted.tolist(), strict=True)
        return [tokens[start : start + count + 1].tolist() for start, count in ends], histories


def proposals_of(rejection: str, draft_ids: Ints, generator: np.random.Generator) -> Proposals | None:
    """Spread: each draft was one of three tokens."""
    if rejection != "spread":
        return certain_proposals(draft_ids) if rejection else None
    others = np.stack((draft_ids, (draft_ids + 1) % VOCAB, (draft_ids + 5) % VOCAB), axis=1)
    probs = generator.dirichlet((2.0, 1.0, 1.0), len(draft_ids))
    return Proposals(np.arange(len(draft_ids)).repeat(3), others.reshape(-1), probs.reshape(-1), probs[:, 0].copy())


def make_step(seed: int, *, rejection: str = "", num_seqs: int = 30) -> Step:
    """`rejection` names what proposals are: of certain tokens, or spread; empty: by equality."""
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    columns, rows = SamplingColumns(2 * num_seqs), generator.permutation(2 * num_seqs)[:num_seqs]
    lengths = generator.integers(1, LONGEST - 6, num_seqs)
    for index, row in enumerate(rows):
        columns.fill(row, 1, KINDS[index % len(KINDS)], rng.getrandbits(62), [])
    counts = generator.integers(0, 5, num_seqs)
    peaks = generator.integers(0, VOCAB, int(counts.sum()) + num_seqs)
    logits = torch.from_numpy(generator.normal(size=(len(peaks), VOCAB))).float()
    logits[torch.arange(len(peaks)), torch.from_numpy(peaks)] += 5.0
    layout = lay_out(counts, np.zeros(counts.sum(), np.int64), None)
    wrong = generator.random(len(layout.places)) < 0.2
    draft_ids = (peaks[layout.places] + wrong) % VOCAB
    drafts = lay_out(counts, draft_ids, proposals_of(rejection, draft_ids, generator))
    tokens = torch.from_numpy(generator.integers(0, VOCAB, (2 * num_seqs, LONGEST)))
    within = np.arange(drafts.num_positions) - drafts.starts.repeat(counts + 1)
    batch = SampleBatch(rows.repeat(counts + 1), lengths.repeat(counts + 1) + within, tokens, columns)
    for place, draft in zip(drafts.places, draft_ids, strict=True):
        tokens[batch.rows[place], batch.lengths[place]] = int(draft)
    return Step(logits, batch, drafts, rows, lengths)


@pytest.mark.parametrize("rejection", ["", "certain", "spread"])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_tokens_as_on_the_host(rejection: str, seed: int) -> None:
    step = make_step(seed, rejection=rejection)
    taken, _ = step.verified(on_device=False)
    found, histories = step.verified(on_device=True)
    assert found == taken
    for row, length, tokens in zip(step.rows, step.lengths, taken, strict=True):
        assert histories[row, length : length + len(tokens)].tolist() == tokens
        assert torch.equal(histories[row, :length], step.batch.tokens[row, :length])
    kept = {(len(one) - 1, int(count)) for one, count in zip(taken, step.drafts.counts, strict=True)}
    assert any(0 < some < count for some, count in kept) and any(some == count > 1 for some, count in kept)


def test_rejection_of_rows_that_sample_nothing() -> None:
    step = make_step(3, rejection="spread")
    for row in step.rows:
        step.batch.columns.fill(int(row), 1, KINDS[0], 0, [])
    assert step.verified(on_device=True)[0] == step.verified(on_device=False)[0]


@pytest.mark.parametrize("value", [float("-inf"), 0.0])
def test_where_nothing_is_left_to_draw(value: float) -> None:
    """Everything is forbidden, or p and q are the same, so that no excess of p is left."""
    step = make_step(5, rejection="certain")
    step.logits.fill_(value)
    assert step.verified(on_device=True)[0] == step.verified(on_device=False)[0]


def test_the_test_would_see_a_wrong_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(1, rejection="spread")
    taken, _ = step.verified(on_device=False)
    monkeypatch.setattr("engine.sampling.rejection.RECOVER_STREAM", 7)
    assert step.verified(on_device=True)[0] != taken
