"""Which of a step's sampled tokens come out: refused drafts and rows that have to wait yield none."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from engine.execution.outputs import sampled_tokens
from engine.execution.outputs.sampled_tokens import MissingSamples, SampledTokens, pick
from engine.execution.schedule import Schedule, read_schedule
from engine.execution.tables.rows import RowTable
from engine.sampling.verification import Verdict
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams

NUM_ROWS = 4


def schedule(drafts: list[list[int]] | None = None, part: int = 1) -> Schedule:
    """Four rows of two tokens; `part` computes only its first, so that three sample."""
    table = RowTable(
        num_rows=NUM_ROWS, max_model_len=32, block_size=8, num_blocks=32, vocab_size=50, device=torch.device("cpu")
    )
    for row in range(NUM_ROWS):
        table.admit(AdmittedSequence(row, pack_tokens([5, 6]), 2, SamplingParams(), 0, []), 0)
        table.append_blocks([row], [1], [row])
    counts = [len(tokens) for tokens in drafts or []]
    scheduled = [
        2 - (row == part) + count for row, count in zip(range(NUM_ROWS), counts or [0] * NUM_ROWS, strict=True)
    ]
    flat = [token for tokens in drafts or [] for token in tokens]
    rows = list(range(NUM_ROWS))
    plan = StepPlan(1, 0, [], rows, [0] * NUM_ROWS, scheduled, [0] * NUM_ROWS, [], [], [], counts, flat)
    return read_schedule(plan, table)


def lacking(*samples: int) -> MissingSamples:
    return MissingSamples(np.array(samples), {})


def of_each(sampled: SampledTokens) -> list[list[int]]:
    return [sampled.of(sample) for sample in range(NUM_ROWS - 1)]


def test_each_row_that_samples_yields_one_token() -> None:
    sampled = SampledTokens(schedule(), None, torch.tensor([7, 8, 9]), None)
    assert sampled.token_ids == [7, 8, 9] and sampled.counts == [1, 0, 1, 1] and sampled.is_known
    assert of_each(sampled) == [[7], [8], [9]] and sampled.yielded.accepted is None


def test_rows_that_have_to_wait_yield_none() -> None:
    sampled = SampledTokens(schedule(), lacking(1), torch.tensor([7, 8, 9]), None)
    assert sampled.token_ids == [7, 9] and sampled.counts == [1, 0, 0, 1]
    assert of_each(sampled) == [[7], [], [9]]


DRAFTS = [[10, 11], [], [], [12]]
TOKENS = torch.tensor([10, 21, 22, 23, 12, 25])  # two drafts and one more, none and one more, one and one more


def test_refused_drafts_yield_none() -> None:
    sampled = SampledTokens(schedule(DRAFTS), None, TOKENS, Verdict(TOKENS, torch.tensor([1, 0, 1])))
    assert sampled.is_known, "nothing is under way on a CPU"
    assert sampled.token_ids == [10, 21, 23, 12, 25] and sampled.counts == [2, 0, 1, 2]
    assert of_each(sampled) == [[10, 21], [23], [12, 25]]
    found = sampled.yielded.accepted
    assert found is not None and found.tolist() == [1, 0, 1]


def test_a_row_with_drafts_that_has_to_wait_yields_none_of_them() -> None:
    plan = schedule(DRAFTS)
    sampled = SampledTokens(plan, lacking(0), TOKENS, Verdict(TOKENS, torch.tensor([2, 0, 0])))
    assert sampled.token_ids == [23, 12] and sampled.counts == [0, 0, 1, 1]
    assert of_each(sampled) == [[], [23], [12]]
    assert plan.num_positions.tolist() == [3, 0, 1, 2], "the schedule stays as it is"


def test_the_places_of_sampled_positions_among_the_states_that_come_back() -> None:
    plan = schedule(DRAFTS)
    assert plan.sampled_places().tolist() == list(range(6))
    batch = msgspec.structs.replace(plan.batch, wanted=np.array([4, 3, 1, 2]))  # as where prompts are scored
    plan = msgspec.structs.replace(plan, batch=batch)
    assert plan.sampled_places().tolist() == [1, 2, 3, 7, 8, 9]


class Ending:
    """A step that is computed when it is waited for."""

    def __init__(self, *results: tuple[torch.Tensor, list[int]]) -> None:
        self._results = results

    def wait(self) -> None:
        for tensor, values in self._results:
            tensor.copy_(torch.tensor(values))


def test_tokens_of_a_step_that_is_queued_are_read_behind_its_end() -> None:
    for read in (lambda sampled: sampled.token_ids, lambda sampled: [sampled.of(n)[0] for n in range(3)]):
        tokens = torch.zeros(3, dtype=torch.int64)
        assert read(SampledTokens(schedule(), None, tokens, None, Ending((tokens, [7, 8, 9])))) == [7, 8, 9]
    accepted, tokens = torch.zeros(3, dtype=torch.int64), TOKENS.clone()
    verdict = Verdict(tokens, accepted)
    late = SampledTokens(schedule(DRAFTS), None, tokens, verdict, Ending((accepted, [1, 0, 1])))
    assert late.counts == [2, 0, 1, 2]


def test_it_is_not_known_what_a_device_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_tokens, "to_host", torch.zeros_like)
    tokens = torch.zeros(3, dtype=torch.int64, device="meta")
    assert SampledTokens(schedule(), None, tokens, None).is_known
    assert not SampledTokens(schedule(DRAFTS), None, tokens, Verdict(tokens, tokens)).is_known


def test_tokens_are_picked_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick(torch.tensor([7, 8, 9]), np.array([2, 0])).tolist() == [9, 7]
    monkeypatch.setattr(sampled_tokens, "to_device", lambda array, device: torch.from_numpy(array).to(device))
    found = pick(torch.zeros(3, dtype=torch.int64, device="meta"), np.array([2, 0]))
    assert found.device.type == "meta" and found.shape == (2,)
