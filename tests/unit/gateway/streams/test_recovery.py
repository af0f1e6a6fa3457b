"""What happens to open streams and questions when services go and come, on a bus that notes what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Calls
from services.gateway.bus.deployment import NEEDED, RosterView
from services.gateway.bus.refusals import unavailable
from services.gateway.streams import recovery as module
from services.gateway.streams.journal import StreamJournal
from services.gateway.streams.latency import StreamLatency
from services.gateway.streams.recovery import PATIENCE, StreamRecovery
from services.gateway.streams.stream import Position, Stream
from shared.errors import RequestError
from shared.messages import (
    AttachRequest,
    EncodeRequest,
    Fingerprint,
    FinishReason,
    Member,
    RequestHeader,
    Roster,
    SequenceText,
    ServiceName,
    StreamLost,
    TokenizeRequest,
)
from shared.requests.sampling import SamplingParams


class NotingBus:
    """Everything is there, until a test takes it away."""

    scheduler = "memory://scheduler"
    scheduler_is_live = True

    def __init__(self) -> None:
        self.live = {service: [f"memory://{service}-a"] for service in NEEDED}
        self.sent: list[tuple[str, Any]] = []
        self.roster = Roster(1, 1, [])

    def members(self, service: ServiceName) -> list[Member]:
        return [Member(service, address, address, 1) for address in self.live[service]]

    def send(self, address: str, message: Any) -> None:
        self.sent.append((address, message))

    def taken(self) -> list[tuple[str, str]]:
        """To which address which kind of message went since the last call."""
        sent, self.sent = self.sent, []
        return [(address.removeprefix("memory://"), type(message).__name__) for address, message in sent]


class Place:
    """A gateway's open streams and questions, and what recovers them; `time` stands still unless it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bus = NotingBus()
        self.journal = StreamJournal(99, 1 << 20)
        self.calls = Calls()
        bus = cast(Bus, self.bus)
        self.recovery = StreamRecovery(bus, RosterView(bus), self.journal, self.calls, resume_timeout=30.0)
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def open(self, request_id: str = "r", has: list[Position] | None = None) -> Stream:
        stream = Stream(TokenizeRequest(RequestHeader(request_id, "g"), SamplingParams(), text="x"), "", has)
        self.journal.add(stream)
        self.recovery.dispatch(stream)
        return stream

    def lose(self, service: ServiceName) -> None:
        self.bus.live[service] = []

    def find(self, service: ServiceName, instance: str = "b") -> None:
        self.bus.live[service] = [f"memory://{service}-{instance}"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


TOKENIZER, REQUEST = "tokenizer-a", "TokenizeRequest"


def hear(stream: Stream, text: str = "a", **more: Any) -> None:
    at = stream.sequences[0]
    news = SequenceText(stream.header.request_id, 0, len(at.token_ids), at.num_chars, text, [1], **more)
    stream.accept(news)


def test_a_request_goes_to_its_tokenizer_and_a_return_to_the_scheduler(place: Place) -> None:
    stream = place.open()
    place.open("back", [Position()])
    assert place.bus.taken() == [(TOKENIZER, REQUEST), ("scheduler", "AttachRequest")]
    assert stream.tokenizer == "memory://tokenizer-a" and place.recovery.paused == []


def test_an_account_of_time_leaves_with_the_request(place: Place) -> None:
    stream = Stream(TokenizeRequest(RequestHeader("r", "g"), SamplingParams(), text="x"), "")
    stream.latency = StreamLatency(50.0)
    place.recovery.dispatch(stream)
    ((_, request),) = place.bus.sent
    assert request.latency is not None and request.latency.stamp > 50.0


@pytest.mark.parametrize("service", NEEDED)
def test_a_stream_pauses_while_a_service_is_missing(place: Place, service: ServiceName) -> None:
    place.lose(service)
    stream = place.open()
    assert place.bus.taken() == [] and place.recovery.paused == [stream]
    place.recovery.resume()
    assert place.bus.taken() == [] and place.recovery.paused == [stream]
    place.find(service)
    place.recovery.resume()
    assert len(place.bus.taken()) == 1 and place.recovery.paused == []
    place.recovery.resume()
    assert place.bus.taken() == [], "once"


def test_a_request_that_is_refused_again_and_again_ends_with_the_refusal(place: Place) -> None:
    """All services are there, and one is too busy for it: each roster sends it again."""
    stream, busy = place.open(), unavailable("no process became free")
    for _ in range(31):
        assert not stream.ended
        place.recovery.refused(stream, busy)
        place.now += 1.0
        place.recovery.resume()
        place.recovery.check_overdue(place.now)
    assert len(place.bus.taken()) > 31
    place.recovery.refused(stream, busy)
    assert stream.error is busy and place.recovery.paused == []


def test_a_refused_request_of_which_nothing_was_heard_is_sent_as_a_new_one(place: Place) -> None:
    stream, busy = place.open(), unavailable("no process became free")
    place.recovery.refused(stream, busy)
    assert not stream.is_resumed
    place.recovery.resume()
    assert place.bus.taken() == [(TOKENIZER, REQUEST)] * 2


def test_a_forgotten_request_leaves_no_note_of_its_refusal(place: Place) -> None:
    """A later request of the same name has the whole time to be taken."""
    stream, busy = place.open(), unavailable("no process became free")
    place.recovery.refused(stream, busy)
    place.recovery.forget(stream)
    place.now += 31.0
    second = place.open()
    place.recovery.refused(second, busy)
    assert not second.ended


def test_a_request_that_no_message_can_hold_ends_and_says_why(place: Place) -> None:
    def send(address: str, message: Any) -> None:
        raise OverflowError("int too big")

    place.bus.send = send  # type: ignore[method-assign]
    stream = place.open()
    assert str(stream.error) == "the request cannot be passed on: int too big"


def test_the_time_of_refusals_begins_anew_behind_output(place: Place) -> None:
    stream, busy = place.open(), unavailable("no worker has room")
    place.recovery.refused(stream, busy)
    place.now += 20.0
    place.recovery.resume()
    hear(stream)
    stream.is_heard = True
    place.recovery.heard("r")
    place.now += 20.0
    place.recovery.refused(stream, busy)
    assert not stream.ended and stream.is_resumed, "a scheduler had taken it: it does not refuse what it let in"
    place.recovery.forget(stream)
    place.now += 20.0
    place.recovery.refused(stream, busy)
    assert not stream.ended


def test_a_stream_waits_for_the_kind_of_worker_that_began_it(place: Place) -> None:
    place.bus.roster = Roster(1, 1, [], fingerprints=[Fingerprint("fp_b")])
    stream = place.open()
    assert len(place.bus.taken()) == 1
    hear(stream, fingerprint="fp_a")
    place.recovery.pause_all()
    place.recovery.resume()
    assert place.bus.taken() == [] and place.recovery.paused == [stream]
    place.now += 31.0
    place.recovery.check_overdue(place.now)
    assert "fp_a" in str(stream.error)


def test_a_new_scheduler_is_told_that_there_was_one(place: Place) -> None:
    stream = place.open()
    place.lose(ServiceName.TOKENIZER)
    waiting = place.open("waiting")
    place.recovery.pause_all()
    assert stream.is_resumed and not waiting.is_resumed, "none had it"
    assert place.recovery.paused == [waiting, stream]
    place.find(ServiceName.TOKENIZER)
    place.bus.taken()
    place.recovery.resume()
    assert place.bus.taken() == [("tokenizer-b", REQUEST)] * 2


def test_a_paused_stream_ends_when_it_has_waited_too_long(place: Place) -> None:
    place.lose(ServiceName.WORKER)
    stream = place.open()
    place.now += 29.0
    place.recovery.pause(stream)
    place.recovery.check_overdue(130.0)
    assert stream.error is None, "not yet"
    place.recovery.check_overdue(130.5)
    assert str(stream.error) == "no worker is live" and place.recovery.paused == []


def test_where_nothing_is_missing_any_more_the_error_says_so(place: Place) -> None:
    place.lose(ServiceName.WORKER)
    stream = place.open()
    place.find(ServiceName.WORKER)
    place.recovery.check_overdue(131.0)
    assert str(stream.error) == "no service took the request in time"


def test_an_ended_or_forgotten_stream_does_not_wait(place: Place) -> None:
    stream, forgotten = place.open(), place.open("forgotten")
    hear(stream, finish_reason=FinishReason.STOP)
    place.recovery.pause(stream)
    place.recovery.pause(forgotten)
    place.recovery.forget(forgotten)
    place.recovery.forget(forgotten)
    assert place.recovery.paused == []


def test_a_lost_tokenizer_s_requests_go_to_another_one(place: Place) -> None:
    fresh, answered, ended, paused = (place.open(name) for name in ("fresh", "answered", "ended", "paused"))
    hear(answered)
    ended.fail(unavailable("gone"))
    place.recovery.pause(paused)
    place.bus.taken()
    place.find(ServiceName.TOKENIZER)
    place.recovery.replace_tokenizers({"memory://tokenizer-x"})
    assert place.bus.taken() == [], "another one is gone"
    place.recovery.replace_tokenizers({"memory://tokenizer-a"})
    assert place.bus.taken() == [("tokenizer-b", REQUEST)], "the scheduler has the one that was answered"
    addresses = [stream.tokenizer.removeprefix("memory://") for stream in (fresh, answered, ended, paused)]
    assert addresses == ["tokenizer-b", "tokenizer-b", "tokenizer-a", "tokenizer-b"]


async def test_questions_go_to_another_tokenizer_or_wait_for_one(place: Place) -> None:
    call = place.calls.add(EncodeRequest("q", "g", text="x"), "memory://tokenizer-a")
    other = place.calls.add(EncodeRequest("p", "g", text="x"), "memory://tokenizer-c")
    place.recovery.resume()
    assert place.bus.taken() == [], "it is being answered"
    place.lose(ServiceName.TOKENIZER)
    place.recovery.replace_tokenizers({"memory://tokenizer-a"})
    assert place.bus.taken() == [] and call.address == "" and other.address == "memory://tokenizer-c"
    place.recovery.resume()
    assert place.bus.taken() == []
    place.find(ServiceName.TOKENIZER)
    place.recovery.resume()
    assert place.bus.taken() == [("tokenizer-b", "EncodeRequest")] and call.address == "memory://tokenizer-b"


async def test_everything_can_be_ended_with_one_reason(place: Place) -> None:
    stream, call = place.open(), place.calls.add(EncodeRequest("q", "g", text="x"), "memory://tokenizer-a")
    place.recovery.fail_all("the scheduler is lost")
    assert str(stream.error) == "the scheduler is lost"
    with pytest.raises(RequestError, match="the scheduler is lost"):
        await place.calls.wait(call, 1.0)


def test_a_silent_stream_is_lost_and_sent_again_unless_it_is_paused(place: Place) -> None:
    silent, paused = place.open("silent"), place.open("paused")
    place.recovery.pause(paused)
    place.recovery.check_overdue(0.0)
    place.bus.taken()
    place.recovery.check_overdue(PATIENCE)
    assert place.bus.taken() == [], "it may just be queued"
    place.recovery.check_overdue(PATIENCE + 0.5)
    assert [type(message) for _, message in place.bus.sent] == [StreamLost, TokenizeRequest]
    assert place.bus.sent[0] == ("memory://scheduler", StreamLost("silent", 0))
    assert silent.is_resumed and not paused.is_resumed
    assert isinstance(place.open("back", [Position()]).next_request, AttachRequest)
