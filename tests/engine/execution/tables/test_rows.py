"""The rows' numbers: what is known, what is computed, and where a plan and a row disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.adapters import UNKNOWN
from engine.execution.outputs.pending_result import HostTimer, PendingResult, start_timer
from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.tables.deferred_verification import DeferredVerification
from engine.execution.tables.row_states import RowStates
from engine.execution.tables.rows import RowsOutOfStep, RowTable
from engine.modeling.batch import Ints
from kernels.ops.linears.lora import NO_ADAPTER
from shared.errors import FatalError
from shared.messages import AdmittedSequence, StepResult
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams
from tests.unit.worker.blocks.test_row_states import Places


def table(**changes: Any) -> RowTable:
    values: dict[str, Any] = {
        "num_rows": 4, "max_model_len": 20, "block_size": 8, "num_blocks": 9, "vocab_size": 50,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return RowTable(**(values | changes))


def admit(rows: RowTable, row: int, tokens: list[int], num_computed: int = 0, num_blocks: int = 2) -> None:
    rows.admit(AdmittedSequence(row, pack_tokens(tokens), len(tokens), SamplingParams(), 0, []), num_computed)
    rows.append_blocks([row], [num_blocks], list(range(num_blocks)))


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def filled(*lengths: int) -> RowTable:
    made = table()
    for row, length in enumerate(lengths):
        admit(made, row, [1 + row] * length)
    return made


def test_a_row_has_what_it_was_admitted_with_and_nothing_of_before() -> None:
    rows = table()
    admit(rows, 2, [5, 6, 7], 1)
    assert rows.tokens[2, :3].tolist() == [5, 6, 7]
    rows.lacks_sample[2] = True
    admit(rows, 2, [8, 9], 0, 1)
    found = rows.num_tokens[2], rows.num_computed[2], rows.num_blocks[2], rows.lacks_sample[2]
    assert found == (2, 0, 1, False)
    rows.release([2])
    assert (rows.num_tokens[2], rows.num_blocks[2]) == (0, 0)
    admit(rows, 1, [1])
    rows.reset()
    assert not rows.num_tokens.any() and not rows.num_blocks.any()


@pytest.mark.parametrize("tokens", [[], [1] * 21, [50], [-1]])
def test_what_no_row_can_begin_with_is_refused(tokens: list[int]) -> None:
    with pytest.raises(FatalError):
        admit(table(), 0, tokens)
    admit(table(), 0, [0, 49] * 10, num_blocks=3)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_there_are_not_are_refused(row: int) -> None:
    with pytest.raises(FatalError):
        admit(table(), row, [1])
    with pytest.raises(FatalError):
        table().release([row])
    with pytest.raises(FatalError):
        table().check_rows([row])
    table().check_rows([0, 3])
    table().check_rows([])
    with pytest.raises(FatalError, match="not distinct"):
        table().check_rows([1, 1])


@pytest.mark.parametrize(
    ("counts", "blocks", "words"),
    [
        ([1, 1], [1], "sum to 2"),
        ([1, 0], [9], "outside"),
        ([1, 0], [-1], "outside"),
        ([4, 0], [1, 2, 3, 4], "4 blocks"),
    ],
)
def test_blocks_that_cannot_be_given_are_refused(counts: list[int], blocks: list[int], words: str) -> None:
    with pytest.raises(FatalError, match=words):
        table().append_blocks([0, 1], counts, blocks)


def test_blocks_go_behind_those_that_a_row_has() -> None:
    rows = table()
    rows.append_blocks([3, 0, 1], [2, 0, 1], [0, 8, 5])
    rows.append_blocks([3, 1], [1, 2], [7, 6, 4])
    assert rows.num_blocks.tolist() == [0, 3, 0, 3]
    assert rows.block_tables[3].tolist() == [0, 8, 7] and rows.block_tables[1].tolist() == [5, 6, 4]


def check(rows: RowTable, row: int, computed: int, end: int, drafts: int | None = None) -> str:
    """What of a plan contradicts a row; empty where nothing does."""
    try:
        lengths = rows.check_schedule(ints(row), ints(computed), ints(end), None if drafts is None else ints(drafts))
    except RowsOutOfStep as error:
        assert error.rows == [row] and str(error).startswith(f"row {row}: ")
        return str(error).split("plan's ")[1].split(" is")[0]
    assert lengths.tolist() == [rows.num_tokens[row]]
    return ""


def test_a_plan_goes_on_where_the_row_is_and_ends_within_its_tokens_and_blocks() -> None:
    rows = filled(10)
    assert check(rows, 0, 0, 10) == check(rows, 0, 0, 1) == ""
    assert check(rows, 0, 1, 10) == "num_computed_tokens"
    assert check(rows, 0, 0, 0) == check(rows, 0, 0, 11) == "planned end"
    rows.num_blocks[0] = 1
    assert check(rows, 0, 0, 8) == "" and check(rows, 0, 0, 9) == "planned end"


def test_drafts_follow_all_tokens_and_are_computed_with_the_last_of_them() -> None:
    rows = filled(10)
    rows.num_computed[0] = 9
    assert check(rows, 0, 9, 12, 2) == ""
    assert check(rows, 0, 9, 11, 2) == check(rows, 0, 9, 13, 2) == "planned end"
    assert check(rows, 0, 9, 10, 0) == "" and check(rows, 0, 9, 10, 1) == "planned end"
    rows.num_computed[0] = 0
    assert check(rows, 0, 0, 5, 0) == "", "others of the step have drafts, and this one computes a part of its prompt"
    rows.num_computed[0] = 10
    assert check(rows, 0, 10, 12, 2) == "planned end", "the last one is computed already"
    long = filled(19)
    long.num_blocks[0], long.num_computed[0] = 3, 18
    assert check(long, 0, 18, 20, 1) == "" and check(long, 0, 18, 21, 2) == "planned end", "max_model_len"


def test_only_the_rows_that_disagree_are_named() -> None:
    rows = filled(5, 5, 5)
    with pytest.raises(RowsOutOfStep, match="row 1: plan's num_computed_tokens is 2, the worker's own") as found:
        rows.check_schedule(ints(0, 1, 2), ints(0, 2, 0), ints(5, 5, 7))
    assert found.value.rows == [1, 2]


def test_a_row_that_was_held_back_computes_its_last_token_again() -> None:
    rows = filled(5, 7)
    rows.num_computed[:2] = 5, 7
    assert rows.excess(ints(0, 1), ints(5, 7)) is None
    rows.hold_back(ints(1))
    assert rows.num_computed[:2].tolist() == [5, 6]
    excess = rows.excess(ints(0, 1), ints(5, 7))
    assert excess is not None and excess.tolist() == [0, 1], "that plan was made before"
    excess = rows.excess(ints(0, 1), ints(5, 6))
    assert excess is not None and excess.tolist() == [0, 0]
    assert rows.excess(ints(0, 1), ints(5, 7)) is None, "it has caught up"


@pytest.mark.parametrize("on_host", [True, False])
def test_sampled_and_accepted_tokens_are_counted(on_host: bool) -> None:
    rows = filled(5, 7, 3)
    if not on_host:
        rows._host_tokens = None  # as on a device
    rows.append_tokens(ints(2, 0), torch.tensor([30, 31]))
    assert rows.num_tokens.tolist() == [6, 7, 4, 0] and int(rows.tokens[2, 3]) == 30 and int(rows.tokens[0, 5]) == 31
    rows.write_drafts(ints(0, 0, 1), ints(6, 7, 7), ints(40, 41, 42))
    assert rows.tokens[0, 6:8].tolist() == [40, 41] and int(rows.tokens[1, 7]) == 42
    rows.num_computed[:3] = 8, 8, 4
    rows.keep_verified(ints(0, 1), ints(2, 1), ints(1, 1))
    assert rows.num_tokens[:3].tolist() == [8, 9, 4] and rows.num_computed[:3].tolist() == [7, 8, 4]
    rows.keep_verified(ints(0, 2), ints(2, 1), ints(0, 1))
    assert rows.num_tokens[:3].tolist() == [9, 9, 6] and rows.num_computed[:3].tolist() == [5, 8, 4]


def test_tokens_on_a_device_are_not_the_host_s() -> None:
    assert table(device=torch.device("meta")).tokens.device.type == "meta"


# -- windows


def test_what_a_window_still_sees_has_to_be_there() -> None:
    rows = table(sliding=[(9, 6), (17, 6)])
    admit(rows, 0, [1] * 20, num_blocks=3)
    rows.num_computed[0] = 16
    for pool in (1, 2):
        rows.append_blocks([0], [3], [1, 2, 3], pool)
    assert check(rows, 0, 16, 20) == ""
    rows.leave_blocks([0], [1], 1)
    assert check(rows, 0, 16, 20) == "", "the first of nine tokens that it sees is in the second block"
    rows.num_computed[0] = 15
    assert check(rows, 0, 15, 20) == "planned end", "one more is in the first"
    rows.num_computed[0] = 16
    rows.leave_blocks([0], [1], 2)
    assert check(rows, 0, 16, 20) == "planned end", "the other window sees the first block still"


def test_a_row_s_tables_are_kept_apart_and_end_where_the_shortest_does() -> None:
    rows = table(sliding=[(9, 6)])
    admit(rows, 0, [1] * 20, num_blocks=3)
    admit(rows, 1, [1] * 20, num_blocks=3)
    rows.append_blocks([0, 1], [2, 3], [5, 4, 3, 2, 1], 1)
    assert rows.block_tables[:2].tolist() == [[0, 1, 2, 5, 4, 0], [0, 1, 2, 3, 2, 1]]
    assert check(rows, 0, 0, 16) == check(rows, 1, 0, 20) == "" and check(rows, 0, 0, 17) == "planned end"
    with pytest.raises(FatalError, match="outside the pool of 6"):
        rows.append_blocks([0], [1], [6], 1)


@pytest.mark.parametrize("anew", [None, "admit", "release", "reset"])
def test_blocks_go_behind_the_places_that_were_left_unless_the_row_begins_anew(anew: str | None) -> None:
    rows = table(sliding=[(9, 6)])
    admit(rows, 0, [1] * 20)
    rows.leave_blocks([0], [2], 1)
    if anew == "admit":
        admit(rows, 0, [1] * 20)
    elif anew is not None:
        rows.release([0]) if anew == "release" else rows.reset()
    rows.append_blocks([0], [1], [5], 1)
    assert rows.block_tables[0].tolist() == ([0, 1, 0, 0, 0, 5] if anew is None else [0, 1, 0, 5, 0, 0])


# -- states


def test_states_go_with_their_rows() -> None:
    states = RowStates(Places(), 4, 0)
    rows = table(states=states)
    admit(rows, 0, [1] * 10)
    assert check(rows, 0, 0, 10) == "", "the first token needs no state"
    rows.num_computed[0] = 4
    assert check(rows, 0, 4, 10) == "num_computed_tokens", "it has none"
    states.advance(ints(0), ints(4))
    assert check(rows, 0, 4, 10) == ""
    states.advance(ints(0), ints(5))
    with pytest.raises(RowsOutOfStep, match="is 4, the worker's own limit or count 5"):
        rows.check_schedule(ints(0), ints(4), ints(10))
    rows.reset()
    assert states.due(ints(0)).tolist() == [-1]


def test_a_row_that_goes_back_takes_its_state_along() -> None:
    states = RowStates(Places(), 4, 0)
    rows = table(states=states)
    for row in range(3):
        admit(rows, row, [1] * 5)
    rows.num_computed[:3] = 4
    every = ints(0, 1, 2)
    states.advance(every, ints(4, 4, 4))
    states.keep(every, ints(4, 4, 4))
    states.advance(every, ints(7, 7, 5))
    rows.num_computed[:3] = 7, 7, 5
    rows.keep_verified(ints(0, 1), ints(2, 2), ints(1, 2))
    rows.hold_back(ints(2))
    assert states.due(every).tolist() == [6, 7, 4] == rows.num_computed[:3].tolist()
    assert states.behind(every, ints(6, 7, 4)).tolist() == [2, 0, 0], "of the first row one draft was refused"


# -- adapters


class Bank:
    """Has a and b, in these places."""

    def place_of(self, digest: str) -> int:
        return {"": NO_ADAPTER, "a": 0, "b": 1}.get(digest, UNKNOWN)


def adapted(row: int, adapter: str) -> AdmittedSequence:
    return AdmittedSequence(row, pack_tokens([1] * 5), 5, SamplingParams(), 0, [], adapter=adapter)


def test_a_row_computes_with_the_adapter_that_it_came_with() -> None:
    rows = table(adapters=Bank())
    for row, adapter in enumerate(("", "a", "b")):
        rows.admit(adapted(row, adapter), 0)
        rows.append_blocks([row], [1], [row])
    every = ints(2, 0, 1)

    def places() -> list[int] | None:
        found = rows.adapters(every)
        return None if found is None else found.tolist()

    assert places() == [1, NO_ADAPTER, 0]
    assert rows.adapters(ints(0)) is None, "nothing of this step has any"
    rows.admit(adapted(1, ""), 0)
    rows.admit(adapted(0, "b"), 0)
    assert places() == [1, 1, NO_ADAPTER]
    rows.release([2])
    rows.reset()
    assert places() is None
    rows.admit(adapted(0, "a"), 0)
    rows.release([0])
    assert places() is None


@pytest.mark.parametrize("bank", [Bank(), None])
def test_a_row_whose_adapter_is_not_held_is_refused(bank: Bank | None) -> None:
    rows = table(adapters=bank)
    for row, adapter in enumerate(("", "gone", "a")):
        rows.admit(adapted(row, adapter), 0)
        rows.append_blocks([row], [1], [row])
    assert check(rows, 0, 0, 5) == "" and check(rows, 1, 0, 5) == "adapter"
    assert check(rows, 2, 0, 5) == ("adapter" if bank is None else "")


class Verified(SampledTokens):
    """A step whose outcome is known: how many drafts of each sample were accepted."""

    def __init__(self, *accepted: int) -> None:
        self.is_known = False
        self.num_reads = 0
        self._outcome = ints(*accepted)

    @property
    def yielded(self) -> Any:
        self.num_reads += 1
        return type("Yielded", (), {"accepted": self._outcome})


def test_deferred_rows_are_settled_once_with_their_own_step_s_outcome() -> None:
    rows = filled(5, 7, 3, 9)
    deferred = DeferredVerification(rows)
    first, second = Verified(2, 0, 1), Verified(1)
    deferred.defer(ints(0, 3), ints(0, 2), ints(2, 1), first)
    deferred.defer(ints(1), ints(0), ints(3), second)
    deferred.defer(ints(), ints(), ints(), Verified())
    deferred.settle([2, -1, 4, 9])
    assert rows.num_tokens.tolist() == [5, 7, 3, 9] and first.num_reads == 0
    deferred.settle([3, 2])
    assert rows.num_tokens.tolist() == [5, 7, 3, 11]
    deferred.settle([0, 1, 3])
    assert rows.num_tokens.tolist() == [8, 9, 3, 11] and rows.num_computed.tolist() == [0, -2, 0, 0]
    assert not deferred._steps
    deferred.settle([0, 1, 3])
    assert rows.num_tokens.tolist() == [8, 9, 3, 11]


def test_dropped_rows_and_other_epochs_are_never_settled() -> None:
    rows = filled(5, 7)
    deferred = DeferredVerification(rows)
    deferred.drop([0])
    deferred.defer(ints(0, 1), ints(0, 1), ints(1, 1), Verified(1, 1))
    deferred.drop([0])
    deferred.settle([0])
    assert rows.num_tokens[0] == 5
    deferred.clear()
    deferred.settle([1])
    assert rows.num_tokens[1] == 7 and not deferred._steps


# -- the time of a step


def test_a_step_on_the_host_is_timed_until_it_was_launched() -> None:
    timer = start_timer(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    timer.stop()
    pending = PendingResult(lambda seconds: StepResult(1, 0, [], [], device_time=seconds), timer.seconds)
    first, again = pending.finish().device_time, pending.finish().device_time
    assert 0.0 < first < 60.0 and first == again


def test_a_step_on_a_device_is_timed_by_events_that_wait_without_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
            assert enable_timing and blocking

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: object) -> float:
            assert end is not self
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = start_timer(torch.device("cuda"))
    timer.stop()
    assert log == ["record", "record"]
    assert timer.seconds() == 0.25 and log == ["record", "record", "wait"]
