"""Embeddings, chunk by chunk, of hidden states that the test makes up."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.outputs.pooling import Classifier, RowPools
from engine.execution.schedule import Schedule
from shared.errors import FatalError
from shared.messages import AdmittedSequence
from shared.packing import pack_tokens
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver

STATES = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0], [-7.0, 8.0], [9.0, 1.0], [2.0, 2.0]])


def admitted(row: int, pooling: Pooling | None) -> AdmittedSequence:
    return AdmittedSequence(row, pack_tokens([1]), 1, SamplingParams(pooling=pooling), 0, [])


def pools(*poolings: Pooling | None) -> RowPools:
    made = RowPools()
    for row, pooling in enumerate(poolings):
        made.admit(admitted(row, pooling))
    return made


def schedule(
    rows: list[int], computed: list[int], scheduled: list[int], ends: list[bool], pooled: list[int]
) -> Schedule:
    """Entries that compute so many tokens behind so many; of those in `pooled` all states come back, else the last."""
    wanted = [
        count if entry in pooled else int(end) for entry, (count, end) in enumerate(zip(scheduled, ends, strict=True))
    ]
    batch = SimpleNamespace(
        rows=np.array(rows), computed=np.array(computed), scheduled=np.array(scheduled), wanted=np.array(wanted)
    )
    found = SimpleNamespace(batch=batch, pooled=np.array(pooled), num_positions=np.array(ends, np.int64))
    return cast(Schedule, found)


MEAN, LAST = Pooling(PoolingKind.MEAN, normalize=False), Pooling(PoolingKind.LAST, normalize=False)


def whole(kind: Pooling, states: Tensor) -> Tensor:
    (found,) = pools(kind).take(schedule([0], [0], [len(states)], [True], [0]), states).values()
    return found


def test_the_mean_and_the_last_of_a_prompt_in_one_step() -> None:
    assert whole(MEAN, STATES).tolist() == pytest.approx(STATES.mean(0).tolist())
    assert whole(LAST, STATES).tolist() == STATES[-1].tolist()
    assert whole(MEAN, STATES).dtype == torch.float32


@pytest.mark.parametrize("kind", [PoolingKind.MEAN, PoolingKind.LAST])
def test_a_vector_is_made_of_length_one_where_that_is_asked_for(kind: PoolingKind) -> None:
    plain, made = whole(Pooling(kind, normalize=False), STATES), whole(Pooling(kind), STATES)
    assert float(made.norm()) == pytest.approx(1.0)
    assert (made * plain.norm()).tolist() == pytest.approx(plain.tolist(), rel=1e-5)


def test_chunks_give_what_the_whole_gives() -> None:
    parts = pools(MEAN)
    assert parts.take(schedule([0], [0], [2], [False], [0]), STATES[:2]) == {}
    assert parts.take(schedule([0], [2], [3], [False], [0]), STATES[2:5]) == {}
    found = parts.take(schedule([0], [5], [1], [True], [0]), STATES[5:])
    assert found[0].tolist() == whole(MEAN, STATES).tolist()


def test_rows_between_others_take_their_own_states() -> None:
    made = pools(None, MEAN, None, LAST)
    states = torch.cat((torch.full((1, 2), 99.0), STATES[:3], torch.full((1, 2), 88.0), STATES[3:5]))
    step = schedule([0, 1, 2, 3], [4, 0, 7, 0], [1, 3, 1, 2], [True, True, True, True], [1, 3])
    found = made.take(step, states)
    assert found[1].tolist() == pytest.approx(STATES[:3].mean(0).tolist()) and found[3].tolist() == STATES[4].tolist()


@pytest.mark.parametrize("end", ["release", "admit", "reset"])
def test_what_a_row_had_before_is_forgotten(end: str) -> None:
    made = pools(MEAN)
    made.take(schedule([0], [0], [2], [False], [0]), STATES[:2])
    if end == "release":
        made.release([0, 5])
    elif end == "reset":
        made.reset()
    assert end == "admit" or (not made._sums and not made._poolings), "what was summed up needs memory"
    made.admit(admitted(0, MEAN))
    found = made.take(schedule([0], [0], [2], [True], [0]), STATES[2:4])
    assert found[0].tolist() == pytest.approx(STATES[2:4].mean(0).tolist())
    assert not made._sums and not made._poolings, "a vector that was made is not kept"
    made.admit(admitted(0, None))
    assert not made._poolings


WEIGHT = torch.tensor([[0.5, -1.0], [2.0, 0.25], [0.0, 1.5]])


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_last_token_is_scored_by_label(activation: str, normalize: bool) -> None:
    made = RowPools(Classifier(WEIGHT, activation))
    made.admit(admitted(0, Pooling(PoolingKind.CLASSIFY, normalize=normalize)))
    (found,) = made.take(schedule([0], [0], [6], [True], [0]), STATES).values()
    scores = [float(row @ STATES[-1]) for row in WEIGHT]
    if normalize and activation == "softmax":
        scores = [math.exp(one) / sum(map(math.exp, scores)) for one in scores]
    elif normalize and activation == "sigmoid":
        scores = [1 / (1 + math.exp(-one)) for one in scores]
    assert found.tolist() == pytest.approx(scores) and found.dtype == torch.float32
    assert not made._poolings


def test_a_model_without_labels_scores_none() -> None:
    with pytest.raises(FatalError, match="labels"):
        whole(Pooling(PoolingKind.CLASSIFY), STATES)


def test_a_runner_embeds_a_prompt_in_chunks_as_in_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-tied")
    found = []
    for counts in ((20,), (7, 12, 1)):
        driver = Driver(make_runner(tmp_path))
        driver.add(0, random_prompt(20, seed=1), SamplingParams(temperature=0.0, pooling=Pooling(PoolingKind.MEAN)))
        driver.add(1, random_prompt(40, seed=2))
        results = [driver.step({0: count, 1: 4}) for count in counts]
        assert [list(result.embeddings) for result in results] == [[]] * (len(counts) - 1) + [[0]]
        found.append(np.frombuffer(results[-1].embeddings[0], "<f4"))
    assert found[0] == pytest.approx(found[1], abs=1e-5) and np.linalg.norm(found[0]) == pytest.approx(1.0)
    driver.finish(0)
    driver.add(0, random_prompt(20, seed=1))
    assert driver.step({0: 20}).embeddings == {}, "the row is another's"
