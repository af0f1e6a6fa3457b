"""The clock of the machine is set back or forth by days: what waits, leaves or has a deadline does not notice."""

from __future__ import annotations

import time

import pytest

from services.gateway.streams.stream import Stream
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.clocks import deadlines
from shared.clocks.clock import steady_time
from shared.clocks.deadlines import received, sent
from shared.messages import AddRequest, AttachRequest, RequestHeader, TokenizeRequest
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.fake_worker import capacity

DAYS = 10 * 86400.0


@pytest.fixture(params=[-DAYS, DAYS], ids=["back", "forth"])
def step(request: pytest.FixtureRequest) -> float:
    value: float = request.param
    return value


def set_clock(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    honest = time.time
    monkeypatch.setattr(time, "time", lambda: honest() + step)


def test_steady_time_goes_on(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    before = steady_time()
    set_clock(monkeypatch, step)
    assert before <= steady_time() < before + 60.0


def test_a_deadline_is_what_is_left_of_it_wherever_it_comes(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """From a process that began before the step to one that began after it."""
    header = sent(RequestHeader("r", "g", deadline=steady_time() + 30.0))
    there = steady_time() + step
    monkeypatch.setattr(deadlines, "steady_time", lambda: there)
    arrived = received(header)
    assert arrived.deadline is not None and 0.0 < arrived.deadline - there <= 30.0
    again = sent(arrived)
    assert again.time_left is not None and again.time_left == pytest.approx(arrived.deadline - there)
    assert received(RequestHeader("r", "g")).deadline is None is sent(RequestHeader("r", "g")).time_left


@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_a_gateway_sends_on_after_a_step_has_as_much_time_left(
    monkeypatch: pytest.MonkeyPatch, step: float, is_resumed: bool
) -> None:
    request = TokenizeRequest(RequestHeader("r", "g", deadline=steady_time() + 30.0), SamplingParams(), text="x")
    stream = Stream(request, "t")
    set_clock(monkeypatch, step)
    stream.is_resumed = is_resumed
    message = stream.next_request
    assert isinstance(message, TokenizeRequest) and message.is_resumed is is_resumed
    assert message.header.time_left is not None and 0.0 < message.header.time_left <= 30.0
    attached = Stream(request, "t", has=[]).next_request
    assert isinstance(attached, AttachRequest) and attached.time_left is not None


def add(core: Scheduler, gateway: str, arrival: float, now: float) -> None:
    params = SamplingParams(max_tokens=8, seed=1).resolved(GenerationDefaults(), max_tokens=16)
    header = RequestHeader("kept", gateway, arrival_time=arrival, is_kept=True)
    core.add(AddRequest(header, params, pack_tokens([1, 2, 3]), [0]), now)


@pytest.mark.parametrize("gateway", ["g0", "g1"])
def test_a_client_that_comes_back_is_known_though_the_clock_went_back(gateway: str) -> None:
    """To the gateway where it was, or to another after that one had gone."""
    core = Scheduler(Policy())
    core.set_detokenizers(["d"])
    core.add_worker("w", 1, capacity())
    add(core, "g0", 5000.0, 1.0)
    if gateway != "g0":
        core.abort_gateway("g0")
        assert not core.requests
    add(core, gateway, 100.0, 2.0)
    assert core.requests["kept"].header.gateway == gateway
    assert "request_attached" in [note.event for note in core.journal.take()]
