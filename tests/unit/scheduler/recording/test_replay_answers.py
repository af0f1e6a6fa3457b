"""What a replay says of one call, and what it reads and refuses."""

from __future__ import annotations

import io
from typing import Any

import pytest

from services.scheduler.recording import replay
from services.scheduler.recording.recorder import CALL, ERROR, FORMAT, LENGTH_BYTES, PLAN, START, _packed, framed
from services.scheduler.recording.replay import RecordedCall, ReplayDifference, answer, calls, described
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError
from shared.messages import AddRequest, StepPlan, StepResult, encode, schema_hash
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World


def plan(step_id: int, **more: Any) -> bytes:
    return encode(StepPlan(1, step_id, [], [], [], [], [], [], [], [], **more))


def begin(**policy: Any) -> bytes:
    return framed(START, FORMAT, "1", schema_hash(), policy)


def played(*frames: bytes, **options: Any) -> replay.Replayed:
    return replay.replay(io.BytesIO(b"".join(frames)), **options)


def test_the_time_of_a_recording_is_that_between_its_first_and_its_last_step() -> None:
    join = framed(CALL, "add_worker", ["w", 1, _packed(capacity())], {})
    steps = [framed(CALL, "schedule", args, kwargs) for args, kwargs in (
        (["w", 5.0], {}), (["w"], {"now": 6.5}), (["w", 9.0], {}), (["w"], {}),
    )]  # fmt: skip
    assert played(begin(), join, *steps[:3]).seconds == 4.0
    assert played(begin(), join, *steps[1:3]).seconds == 2.5
    assert played(begin(), join, steps[0]).seconds == 0.0 == played(begin(), join).seconds
    found = played(begin(), join, *steps[:3])
    assert (found.num_events, found.num_plans, found.num_requests, found.foreign) == (4, 0, 0, "")


def test_what_other_messages_made_is_said() -> None:
    found = played(framed(START, FORMAT, "0.0.7", "other", {}))
    assert "0.0.7" in found.foreign and found.difference is None


def test_settings_that_this_version_does_not_have_are_left_out() -> None:
    assert played(begin(max_n=3, unheard_of=1)).difference is None


def test_a_check_that_fails_is_a_difference_at_its_event() -> None:
    def check(core: Scheduler) -> None:
        if core.replicas:
            raise RuntimeError("it does not hold")

    join = framed(CALL, "add_worker", ["w", 1, _packed(capacity())], {})
    quiet = framed(CALL, "expire", [1.0], {})
    found = played(begin(), quiet, join, quiet, check=check)
    assert found.difference == ReplayDifference(2, "add_worker('w', 1, WorkerCapacity)", "it does not hold")
    assert found.num_events == 2 and str(found.difference).startswith("event 2, add_worker('w'")


def said(call: RecordedCall) -> str:
    return answer(Scheduler(Policy()), call, None)[1]


def test_errors_now_and_then_are_compared() -> None:
    fails = RecordedCall("ask_holdings", ["w"], {}, error="KeyError: 'w'")
    assert said(fails) == ""
    assert said(RecordedCall("ask_holdings", ["w"], {})) == "raised nothing, now KeyError: 'w'"
    assert said(RecordedCall("expire", [1.0], {}, error="KeyError: 'w'")) == "raised KeyError: 'w', now nothing"
    assert said(RecordedCall("ask_holdings", ["w"], {}, is_last=True)) == "raises KeyError: 'w'", "it died of that"
    assert said(RecordedCall("expire", [1.0], {}, is_last=True)) == ""


def test_plans_now_and_then_are_compared() -> None:
    world = World()
    world.add("r", [1, 2, 3])
    core = world.scheduler
    made, what = answer(core, RecordedCall("schedule", ["w0"], {}, plan=plan(0)), None)
    assert made and what.startswith("step 0 differs: epoch was") is (made != b"" and "epoch was" in what)
    assert "rows was [], is [15]" in what or "rows was []" in what
    assert answer(core, RecordedCall("schedule", ["w0"], {}), None)[1] == "a plan is made where there was none"
    assert answer(core, RecordedCall("schedule", ["w0"], {}, plan=plan(2)), None)[1] == (
        "no plan is made where there was one"
    )
    assert answer(core, RecordedCall("schedule", ["w0"], {}, is_last=True), None)[1] == "", "its outcome may be missing"
    assert replay.compared(plan(1), plan(1)) == ""


def test_long_values_are_cut() -> None:
    before, now = plan(1, draft_token_ids=list(range(200))), plan(1, draft_token_ids=[7])
    words = replay.compared(before, now)
    assert words.startswith("step 1 differs: draft_token_ids was [0, 1, 2") and words.endswith("..., is [7]")
    (_, _, rest) = words.partition(" was ")
    assert rest.index("...") == 120
    assert replay._short("x" * 118) == repr("x" * 118) and replay._short("x" * 119).endswith("...")


def test_a_call_is_described_without_prompts() -> None:
    world = World()
    world.add("r", [1, 2, 3])
    asked = world.scheduler.requests["r"]
    message = AddRequest(asked.header, asked.params, b"", [])
    assert described(RecordedCall("add", [message, 1.5], {})) == "add(request r, 1.5)"
    assert described(RecordedCall("apply", ["w", StepResult(1, 7, [], [])], {})) == "apply('w', result of step 7)"
    assert described(RecordedCall("f", ["y" * 90], {})) == f"f('{'y' * 59}...)"


def test_calls_come_with_their_outcomes() -> None:
    frames: list[list[Any]] = [
        [CALL, "expire", [1.0], {}], [CALL, "schedule", ["w"], {}], [PLAN, b"p"], [CALL, "expire", [], {}],
        [ERROR, "KeyError", "x"],
    ]  # fmt: skip
    found = list(calls(frames))
    assert [(one.name, one.plan, one.error, one.is_last) for one in found] == [
        ("expire", b"", "", False), ("schedule", b"p", "", False), ("expire", b"", "KeyError: x", True)
    ]  # fmt: skip
    assert list(calls([])) == []


@pytest.mark.parametrize(
    "frames",
    [
        [[PLAN, b"p"]], [[ERROR, "a", "b"]], [["other", 1]], [[CALL, "no_event", [], {}]], [[]], [[CALL]],
        [[CALL, "expire", [1.0]]], [[CALL, "expire", 1.0, {}]], [[CALL, ["expire"], [1.0], {}]],
        [[CALL, "expire", [1.0], {}], [PLAN]], [[CALL, "expire", [1.0], {}], [ERROR, "a"]],
    ],
)  # fmt: skip
def test_frames_that_are_damaged_or_in_a_wrong_place_are_refused(frames: list[list[Any]]) -> None:
    with pytest.raises(ProtocolError):
        list(calls(frames))


@pytest.mark.parametrize(
    "frame",
    [
        framed(START, FORMAT + 1, "1", "s", {}), framed(START, FORMAT, "1", "s"), framed(CALL, FORMAT, "1", "s", {}),
        framed(START, FORMAT, "1", "s", []), begin(tenant_weights=3), begin(max_n="many"),
    ],
)  # fmt: skip
def test_another_format_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        played(frame)


def test_a_frame_that_is_cut_ends_the_recording_and_a_huge_one_is_refused() -> None:
    whole = begin() + framed(CALL, "expire", [1.0], {}) + framed(CALL, "expire", [2.0], {})
    assert played(whole[:-1]).num_events == 1 and played(whole).num_events == 2
    assert played(whole + b"\x01").num_events == 2
    with pytest.raises(ProtocolError, match="too large"):
        played(begin() + (1 << 31).to_bytes(LENGTH_BYTES, "little") + b"x" * 20)


@pytest.mark.parametrize("text", [b"\xff\xff", b"expir\xc3"])
def test_text_that_is_none_is_refused(text: bytes) -> None:
    """A recording of a scheduler that died has no checksum at its end, so damaged bytes come this far."""
    sound = framed(CALL, "x" * len(text), [1.0], {})
    with pytest.raises(ProtocolError, match="cannot be read"):
        played(begin() + sound.replace(b"x" * len(text), text))
