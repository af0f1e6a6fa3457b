"""Two halves of a step: how it is divided, and whose turn it is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from engine.modeling.batch import StepBatch
from engine.modeling.torch_decoder.dual_batch import DualBatch, halves

CPU = torch.device("cpu")


def batch(*scheduled: int) -> StepBatch:
    rows = np.arange(len(scheduled))
    return StepBatch(
        rows=rows + 3,
        computed=rows * 10,
        scheduled=np.array(scheduled),
        wanted=np.ones_like(rows),
        tokens=torch.zeros(1, 1, dtype=torch.int64),
        block_tables=np.zeros((1, 1), np.int64),
        block_size=8,
    )


@pytest.mark.parametrize(
    ("scheduled", "first"), [((1, 1), 1), ((1, 1, 1), 1), ((1, 1, 1, 1), 2), ((9, 1, 1), 1), ((1, 1, 9), 2)]
)
def test_halves_have_about_as_many_tokens(scheduled: tuple[int, ...], first: int) -> None:
    whole = batch(*scheduled)
    found = halves(whole, 2)
    assert found is not None
    assert [one.scheduled.tolist() for one in found] == [list(scheduled[:first]), list(scheduled[first:])]
    for name in ("rows", "computed", "scheduled", "wanted"):
        assert np.concatenate([getattr(one, name) for one in found]).tolist() == getattr(whole, name).tolist()


def test_few_tokens_and_single_sequences_stay_whole() -> None:
    assert halves(batch(3, 3), 7) is None
    assert halves(batch(3, 4), 7) is not None
    assert halves(batch(100), 7) is None


def test_halves_take_turns_wherever_one_waits() -> None:
    dual, said = DualBatch(CPU), list[str]()

    def compute(name: str, times: int) -> str:
        for turn in range(times):
            said.append(f"{name}{turn}")
            dual.pass_turn()
        return name

    for lengths in ((3, 3), (1, 4), (4, 1), (0, 2), (2, 0)):
        said.clear()
        assert dual.run(partial(compute, "a", lengths[0]), partial(compute, "b", lengths[1])) == ("a", "b")
        both = min(lengths)
        assert said[: 2 * both] == [f"{name}{turn}" for turn in range(both) for name in "ab"]
        assert len(said) == sum(lengths)
    dual.pass_turn()  # where nothing takes turns
    dual.close()


@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_half_that_fails_leaves_the_turn_to_the_other(failing: str) -> None:
    dual, said = DualBatch(CPU), list[str]()

    def compute(name: str) -> str:
        dual.pass_turn()
        if name == failing:
            raise RuntimeError(name)
        dual.pass_turn()
        said.append(name)
        return name

    for _ in range(2):
        with pytest.raises(RuntimeError, match=failing):
            dual.run(lambda: compute("first"), lambda: compute("second"))
    assert len(said) == 2 and failing not in said
    dual.close()
