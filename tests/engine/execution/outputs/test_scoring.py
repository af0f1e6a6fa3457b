"""Log-probabilities piece by piece, and which of the sampled positions' come out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.execution.outputs import scoring
from engine.execution.outputs.sampled_tokens import YieldedTokens
from engine.execution.outputs.scoring import MOST_ROWS, SampledScores, score_rows

VOCAB = 11


def logits(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("count", [1, 3, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS + 5])
def test_pieces_are_what_the_whole_is(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    all_logits, tokens = logits(count), torch.arange(count) % VOCAB
    counts = np.arange(count) % 4
    made = score_rows(all_logits.__getitem__, tokens, counts, VOCAB)
    assert len(made.pieces) == -(-count // MOST_ROWS)
    found = made.read()
    monkeypatch.setattr(scoring, "MOST_ROWS", 4 * MOST_ROWS)
    assert found == score_rows(all_logits.__getitem__, tokens, counts, VOCAB).read()
    expected = all_logits.double().log_softmax(-1)
    for place, one in enumerate(found):
        assert len(one.token_ids) == 1 + counts[place] and one.token_ids[0] == place % VOCAB
        assert one.logprobs == pytest.approx(expected[place, one.token_ids].tolist(), abs=1e-6)
        assert one.rank == 1 + int((expected[place] > expected[place, place % VOCAB]).sum())


def test_positions_that_do_not_come_out_have_no_scores() -> None:
    positions = np.array([0, 2, 3, 5])
    tokens = torch.tensor([1, 2, 3, 4])
    made = SampledScores(positions, score_rows(logits(4).__getitem__, tokens, np.array([0, 1, 0, 2]), VOCAB))
    yielded = YieldedTokens(np.array([2, 1]), np.array([0, 1, 5]), None)
    found = made.read(yielded)
    assert [one and one.token_ids[0] for one in found] == [1, None, 4]
    everything = YieldedTokens(np.array([6]), np.arange(6), None)
    assert [one and one.token_ids[0] for one in made.read(everything)] == [1, None, 2, 3, None, 4]
    assert made.read(YieldedTokens(np.array([0]), np.array([], np.int64), None)) == []
