"""A scheduler whose model sleeps: what comes is held, booked as waiting, and goes to the first worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.sleep import ModelSleep
from shared.activity import Activity, mark_asleep, read_activity, write_activity
from shared.clocks.clock import steady_time
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    AddRequest,
    AttachRequest,
    GetLoad,
    Goodbye,
    LatencyBreakdown,
    Load,
    RequestHeader,
    RequestRejected,
    Roster,
    ServiceName,
    StepPlan,
    Tick,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.tracing.phases import NUM_PHASES, Phase
from tests.unit.scheduler.actor.shell import Shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """With a worker, until `asleep`."""
    made = Shell(monkeypatch, activity_dir=str(tmp_path), max_num_queued_reqs=3)
    made.join("w", "d", "g")
    return made


def fall_asleep(shell: Shell, directory: Path) -> None:
    """The mark first, then the worker leaves."""
    mark_asleep(directory, asleep=True)
    shell.hear(Tick())
    assert shell.taken(Roster, "at-g")[-1].is_asleep
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    shell.sent.clear()


def held(shell: Shell) -> ModelSleep:
    return shell.actor.sleep


def test_requests_wait_for_the_first_worker_in_their_order(shell: Shell, tmp_path: Path) -> None:
    fall_asleep(shell, tmp_path)
    shell.ask("a")
    shell.ask("b")
    shell.ask("b")  # again, as a gateway does that has heard nothing
    assert len(held(shell)) == 2 and not shell.actor.core.requests and not shell.taken(RequestRejected)
    shell.hear(GetLoad("q", "at-g"))
    assert shell.taken(Load)[0].num_waiting == 2
    held(shell)._queue.drain(5)
    said = read_activity(tmp_path)
    assert said is not None and said.is_asleep and said.wants_workers, "the supervisor reads that it is wanted"
    shell.hear(AttachRequest("b", "at-other"))
    shell.hear(AbortRequest("a", gateway="at-other"))
    assert len(held(shell)) == 2, "a gateway ends no request of another's"
    shell.hear(AbortRequest("a", gateway="at-g"))
    shell.hear(shell.hello("w2"))
    assert list(shell.actor.core.requests) == ["b"] and not len(held(shell))
    assert shell.actor.core.requests["b"].header.gateway == "at-other"
    assert shell.taken(StepPlan, "at-w2")


def test_a_replay_does_not_take_a_held_request_from_the_gateway_of_a_later_call(shell: Shell, tmp_path: Path) -> None:
    """As of a tokenizer that stood still, and passes on what it was given before the client came back."""
    fall_asleep(shell, tmp_path)
    shell.ask("a")
    shell.hear(AttachRequest("a", "at-other"))
    shell.ask("a")
    params = SamplingParams(max_tokens=6, seed=1).resolved(GenerationDefaults(), max_tokens=16)
    for gateway, seconds in (("at-other", 0.0), ("at-third", 2.0)):
        header = RequestHeader("b", gateway, arrival_time=shell.actor.now + seconds)
        shell.hear(AddRequest(header, params, pack_tokens([1, 2, 3, 4]), [0]))
    shell.ask("b")
    shell.hear(shell.hello("w2"))
    gateways = {name: request.header.gateway for name, request in shell.actor.core.requests.items()}
    assert gateways == {"a": "at-other", "b": "at-third"}


def test_the_wait_is_a_phase_of_its_own(shell: Shell, tmp_path: Path) -> None:
    ask_with_times(shell, "running")
    fall_asleep(shell, tmp_path)
    ask_with_times(shell, "new")
    shell.actor.now += 5.0
    shell.hear(Tick())  # as at every heartbeat
    shell.hear(shell.hello("w2"))
    core = shell.actor.core
    for name in ("running", "new"):
        (sequence,) = core.requests[name].sequences
        assert core.accounts.sequences[sequence].breakdown(shell.actor.now).spent[Phase.WAKING] == 5_000_000, name


def ask_with_times(shell: Shell, request_id: str) -> None:
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True).resolved(GenerationDefaults(), max_tokens=16)
    latency = LatencyBreakdown([0] * NUM_PHASES, stamp=shell.actor.now)
    header = RequestHeader(request_id, "at-g", arrival_time=shell.actor.now)
    shell.hear(AddRequest(header, params, pack_tokens([1, 2, 3, 4]), [0], latency=latency))


def test_a_deadline_and_a_full_queue_are_answered(shell: Shell, tmp_path: Path) -> None:
    fall_asleep(shell, tmp_path)
    shell.ask("late", time_left=1.0)
    for name in "abc":
        shell.ask(name)
    counters = shell.actor.core.counters
    assert (counters.num_rejected, counters.num_expired) == (1, 0)
    (refused,) = shell.taken(RequestRejected, "at-g")
    assert refused.request_id == "c" and refused.code is RejectCode.RESOURCE_EXHAUSTED
    shell.actor.now = steady_time() + 2.0
    shell.hear(Tick())
    (late,) = shell.taken(RequestRejected, "at-g")
    assert late.request_id == "late" and late.code is RejectCode.DEADLINE_EXCEEDED and len(held(shell)) == 2
    assert (counters.num_rejected, counters.num_expired) == (1, 1)


def test_what_is_held_of_the_background_is_told_as_such(shell: Shell, tmp_path: Path) -> None:
    fall_asleep(shell, tmp_path)
    shell.ask("live")
    shell.ask("batch 1", is_background=True)
    shell.ask("batch 2", is_background=True)
    shell.hear(GetLoad("q", "at-g"))
    (load,) = shell.taken(Load)
    assert (load.num_waiting, load.num_background_waiting) == (1, 2)


def test_the_supervisor_is_told_at_once_of_the_first_request_and_of_others_at_the_next_tick(
    shell: Shell, tmp_path: Path
) -> None:
    fall_asleep(shell, tmp_path)
    shell.hear(Tick())

    def said() -> int:
        """How many requests wait, as it was said last."""
        held(shell)._queue.drain(5)
        activity = read_activity(tmp_path)
        assert activity is not None
        return activity.num_requests

    assert said() == 0
    write_activity(tmp_path, Activity(num_requests=77))
    shell.hear(GetLoad("q", "at-g"))
    assert said() == 77, "there is nothing to say"
    shell.ask("a")
    assert said() == 1
    shell.ask("b")
    assert said() == 1, "it is about to bring a worker"
    shell.hear(Tick())
    assert said() == 2


def test_what_a_gateway_has_asked_for_goes_with_it(shell: Shell, tmp_path: Path) -> None:
    fall_asleep(shell, tmp_path)
    shell.hear(shell.hello("g2"))
    for name in ("stays", "goes"):
        shell.ask(name)
    shell.hear(AttachRequest("stays", "at-g2"))
    shell.hear(Goodbye(ServiceName.GATEWAY, "g", 1))
    assert len(held(shell)) == 1
    shell.hear(shell.hello("w2"))
    assert list(shell.actor.core.requests) == ["stays"]


def test_a_model_that_cannot_be_loaded_refuses_what_waits(shell: Shell, tmp_path: Path) -> None:
    fall_asleep(shell, tmp_path)
    shell.ask("a")
    mark_asleep(tmp_path, asleep=False)
    shell.hear(Tick())
    (refused,) = shell.taken(RequestRejected, "at-g")
    assert refused.code is RejectCode.UNAVAILABLE and not shell.taken(Roster, "at-g")[-1].is_asleep


def test_of_a_model_that_sleeps_from_the_start_no_length_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last worker was that of an earlier life of the scheduler; a roster says 0."""
    mark_asleep(tmp_path, asleep=True)
    shell = Shell(monkeypatch, activity_dir=str(tmp_path))
    shell.hear(shell.hello("g"))
    roster = shell.taken(Roster, "at-g")[-1]
    assert roster.is_asleep and (roster.model, roster.max_model_len, roster.max_input_length) == (None, 0, 0)
    shell.join("w")
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    roster = shell.taken(Roster, "at-g")[-1]
    assert roster.model is not None and (roster.max_model_len, roster.max_input_length) == (128, 127)


def test_gateways_know_a_later_roster_by_its_version(shell: Shell, tmp_path: Path) -> None:
    """Whether members, adapters or the sleep have changed."""
    versions = [shell.actor._roster().version]
    for asleep in (True, False, True):
        mark_asleep(tmp_path, asleep=asleep)
        shell.hear(Tick())
        versions.append(shell.actor._roster().version)
    shell.hear(shell.hello("g2"))
    versions.append(shell.actor._roster().version)
    assert versions == sorted(set(versions))


def test_what_is_held_is_not_refused_once_a_worker_is_there(shell: Shell, tmp_path: Path) -> None:
    """Each completion counts, and each sequence that an earlier worker had begun."""
    shell.ask("begun")
    fall_asleep(shell, tmp_path)
    params = SamplingParams(n=2, max_tokens=6, seed=1).resolved(GenerationDefaults(), max_tokens=16)
    for name in ("two", "too many"):
        header = RequestHeader(name, "at-g", arrival_time=shell.actor.now)
        shell.hear(AddRequest(header, params, pack_tokens([1, 2, 3, 4]), [0]))
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["too many"]
    shell.hear(shell.hello("w2"))
    assert not shell.taken(RequestRejected) and list(shell.actor.core.requests) == ["begun", "two"]


def test_completions_that_are_held_count_with_their_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shell = Shell(monkeypatch, activity_dir=str(tmp_path), max_num_queued_tokens=9)
    shell.join("w", "d", "g")
    fall_asleep(shell, tmp_path)
    params = SamplingParams(n=3, max_tokens=6, seed=1).resolved(GenerationDefaults(), max_tokens=16)
    shell.hear(AddRequest(RequestHeader("three", "at-g"), params, pack_tokens([1, 2, 3, 4]), [0]))
    shell.ask("later")
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["later"]
    shell.hear(shell.hello("w2"))
    assert not shell.taken(RequestRejected) and list(shell.actor.core.requests) == ["three"]


def test_tokens_that_are_held_count_against_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each request has four."""
    shell = Shell(monkeypatch, activity_dir=str(tmp_path), max_num_queued_tokens=8)
    shell.join("w", "d", "g")
    fall_asleep(shell, tmp_path)
    for name in "abc":
        shell.ask(name)
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["c"]
    held(shell)._queue.drain(5)
    shell.hear(Tick())
    held(shell)._queue.drain(5)
    said = read_activity(tmp_path)
    assert said is not None and said.num_taken == 3
