"""What the detokenizer books of a request's time: the hop to it, its own work, and decoding until a stop string."""

from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

from services.detokenizer.stream import TextStream
from services.detokenizer.table import StreamTable
from shared.messages import (
    FinishReason,
    LatencyBreakdown,
    RequestRejected,
    SequenceTokens,
    StopMatched,
    StreamLost,
    TokenBatch,
)
from shared.tracing.phases import NUM_PHASES, Phase
from tests.unit.detokenizer.models import BUNDLED, factory, opened, tokenizer


def spent(**seconds: float) -> list[int]:
    found = [0] * NUM_PHASES
    for name, value in seconds.items():
        found[Phase[name.upper()]] = round(value * 1e6)
    return found


def tokens(
    ids: list[int], offset: int, latency: LatencyBreakdown | None, finish: FinishReason | None = None
) -> SequenceTokens:
    return SequenceTokens("r", 0, offset, ids, finish_reason=finish, latency=latency)


SENT = LatencyBreakdown(spent(prefill=1.0), 100.0, 3, 2, 1)


def test_the_hop_is_booked_and_a_busy_service_s_mailbox_is_its_own_time() -> None:
    stream = TextStream(opened(), factory(BUNDLED))
    said = stream.advance(tokens([5], 0, SENT), 100.25, 100.25)
    assert said is not None and said.latency == LatencyBreakdown(
        spent(prefill=1.0, to_detokenizer=0.25), 100.25, 3, 2, 1
    )
    said = stream.advance(tokens([6], 1, SENT), 100.75, 100.5)
    assert said is not None and said.latency is not None and said.latency.stamp == 100.5
    said = stream.advance(tokens([7], 2, None), 101.0, 101.0)
    assert said is not None and said.latency is None


def test_until_a_stop_string_the_time_was_decoding() -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two three")
    stream = TextStream(opened(stop=["three"]), factory(BUNDLED))
    stream.advance(tokens(ids[:1], 0, SENT), 100.5, 100.5, 100.0)
    between = stream.advance(tokens(ids[1:2], 1, None), 100.75, 100.75, 100.75)
    assert between is not None and between.latency is None
    last = stream.advance(tokens(ids[2:], 2, None), 103.0, 103.0, 102.0)
    assert last is not None and last.finish_reason is FinishReason.STOP
    expected = LatencyBreakdown(spent(prefill=1.0, decode=2.0, to_detokenizer=1.0), 103.0, 3, 2, 1)
    assert last.latency == expected


def test_without_an_account_a_stop_string_has_none() -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two")
    said = TextStream(opened(stop=["two"]), factory(BUNDLED)).advance(tokens(ids, 0, None), 103.0, 103.0, 102.0)
    assert said is not None and said.finish_reason is FinishReason.STOP and said.latency is None


def test_numbers_that_make_no_sense_are_not_gone_on_with() -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two three")
    stream = TextStream(opened(stop=["three"]), factory(BUNDLED))
    stream.advance(tokens(ids[:1], 0, msgspec.structs.replace(SENT, spent=[1])), 100.5, 100.5, 100.0)
    last = stream.advance(tokens(ids[1:], 1, None), 3.0, 3.0, 2.0)
    assert last is not None and last.latency is not None
    assert last.latency.spent == spent(decode=2.0, to_detokenizer=1.0), "it begins with nothing"


def test_the_time_until_texts_leave_is_the_detokenizer_s() -> None:
    table = StreamTable(factory(BUNDLED))
    other = opened("s")
    table.apply(
        TokenBatch([opened(), other], [tokens([5], 0, SENT), SequenceTokens("s", 0, 0, [6])], stamp=100.0), 100.5, 100.5
    )
    ((address, texts),) = table.take_texts(101.5).items()
    assert address == "memory://gateway"
    assert [said.request_id for said in texts] == ["r", "s"] and texts[1].latency is None
    assert texts[0].latency == LatencyBreakdown(spent(prefill=1.0, to_detokenizer=0.5, detokenise=1.0), 101.5, 3, 2, 1)
    assert table.take_texts(102.0) == {}, "they were taken"


def test_the_stamp_of_a_batch_ends_its_decoding() -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two")
    table = StreamTable(factory(BUNDLED))
    table.apply(TokenBatch([opened(stop=["two"])], [tokens(ids[:1], 0, SENT)], stamp=100.0), 100.0, 100.0)
    table.apply(TokenBatch([], [tokens(ids[1:], 1, None)], stamp=104.0), 105.0, 105.0)
    last = table.take_texts(105.0)["memory://gateway"][-1]
    assert last.latency is not None and last.latency.spent == spent(prefill=1.0, decode=4.0, to_detokenizer=1.0)
    assert table.take_notices() == [StopMatched("r", 0, len(ids))] and table.take_notices() == []


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_defect_is_told_to_both_sides_with_the_tokens_that_had_come(num_good: int) -> None:
    table = StreamTable(factory(BUNDLED))
    table.apply(TokenBatch([opened()], [tokens([5, 6][:num_good], 0, None)]))
    table.take_texts()
    broken = tokens(["x"], num_good, None)  # type: ignore[list-item]
    table.apply(TokenBatch([], [broken, broken]))
    ((gateway, rejection),) = table.take_rejections()
    assert gateway == "memory://gateway" and isinstance(rejection, RequestRejected) and rejection.request_id == "r"
    (stopped,) = table.take_notices()
    assert isinstance(stopped, StopMatched) and stopped.num_output_tokens == num_good + 1
    assert not table.streams and table.take_rejections() == [] and table.take_texts() == {}


def test_what_is_forgotten_is_lost_and_what_was_closed_is_not() -> None:
    table = StreamTable(factory(BUNDLED))
    table.apply(TokenBatch([opened(), opened("s")], [], [("s", 0)]))
    table.clear()
    table.apply(TokenBatch([], [tokens([5], 0, None), SequenceTokens("s", 0, 0, [5])]))
    assert table.take_notices() == [StreamLost("r", 0), StreamLost("s", 0)], "nothing is remembered of another life"
    assert table.take_notices() == []
    table.apply(TokenBatch([opened(), opened("s", gateway="memory://other")], []))
    table.forget_gateway("memory://other")
    assert list(table.streams) == [("r", 0)]
    table.apply(TokenBatch([], [SequenceTokens("s", 0, 0, [5])]))
    assert table.take_notices() == [], "tokens that were under way"


def test_of_closed_streams_those_that_ended_last_are_remembered() -> None:
    table = StreamTable(factory(BUNDLED), max_closed=2)
    for request_id in ("a", "b"):
        table.apply(TokenBatch([opened(request_id)], [], [(request_id, 0)]))
    table.apply(TokenBatch([], [], [("a", 0)]))  # told again
    table.apply(TokenBatch([opened("c")], [], [("c", 0)]))
    table.apply(TokenBatch([], [SequenceTokens(request_id, 0, 0, [5]) for request_id in "abc"]))
    assert table.take_notices() == [StreamLost("b", 0)]


def test_an_end_is_logged_where_times_are_accounted_for() -> None:
    for latency, events in ((SENT, ["stream_finished"]), (None, [])):
        table = StreamTable(factory(BUNDLED))
        with capture_logs() as lines:
            table.apply(TokenBatch([opened()], [tokens([5, 6], 0, latency, FinishReason.LENGTH)]))
            table.apply(TokenBatch([], [tokens([5, 6], 0, latency, FinishReason.LENGTH)]))
        assert [line["event"] for line in lines] == events
        assert all(line["num_output_tokens"] == 2 for line in lines)
