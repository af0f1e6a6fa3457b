"""What a call's line and the metrics say of its times and counts, with a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.streams import report as module
from services.gateway.streams.latency import StreamLatency
from services.gateway.streams.report import StreamReport
from services.gateway.streams.stream import Position, Stream
from shared.clocks.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.exposition import RequestMeter
from shared.messages import AttachRequest, FinishReason, LatencyBreakdown, RequestHeader, SequenceText, TokenizeRequest
from shared.requests.sampling import SamplingParams
from shared.tracing.phases import NUM_MISSES, NUM_PHASES

SENT = 5000.0  # wall time at which the client sent its request


@dataclass
class SetClock:
    """Stands in for the module `time`."""

    seconds: float = 100.0

    def perf_counter(self) -> float:
        return self.seconds

    def time(self) -> float:
        return SENT


def make_request(*, is_gathered: bool = False, **params: Any) -> TokenizeRequest:
    header = RequestHeader("r", "memory://gateway", arrival_time=SENT, is_gathered=is_gathered)
    return TokenizeRequest(header, SamplingParams(**params), text="x" * 10)


def last_news(text: str, tokens: list[int], index: int = 0) -> SequenceText:
    news = SequenceText("r", index, token_offset=0, text_offset=0, text=text, token_ids=tokens, num_prompt_tokens=7)
    return msgspec.structs.replace(news, finish_reason=FinishReason.LENGTH)


def test_times_of_a_call_that_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = SetClock(), RequestMeter("m")
    monkeypatch.setattr(module, "time", clock)
    stream, report = Stream(make_request(max_tokens=9), "memory://tokenizer"), StreamReport(meter)
    with capture_logs() as logs:
        report.received(stream.request)
        report.opened(stream)
        for pause in (2.0, 0.5, 1.5):
            clock.seconds += pause
            report.progressed()
        stream.accept(last_news("abc", [1, 2, 3]))
        clock.seconds += 1.0
        report.finished(stream)
    line = logs[-1]
    assert (line["ttft_ms"], line["tpot_ms"], line["itl_max_ms"], line["e2e_ms"]) == (2000.0, 1000.0, 1500.0, 5000.0)
    assert (line["prompt_tokens"], line["completion_tokens"], line["status"]) == (7, 3, "OK")
    sums = {name: histogram.sum for name, histogram in meter.histograms.items()}
    assert (sums["ttft"], sums["tpot"], sums["e2e"], sums["itl"]) == (2.0, 1.0, 5.0, 2.0)
    assert (sums["prompt_tokens"], sums["output_tokens"], sums["n"], sums["max_tokens"]) == (7.0, 3.0, 1.0, 9.0)
    assert meter.successes == {"length": 1}


def finished_line(
    monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...], tokens: list[int], **more: Any
) -> tuple[dict[str, Any], RequestMeter]:
    """The line and the counts of a call with an output after each pause."""
    clock, meter = SetClock(), RequestMeter("m")
    monkeypatch.setattr(module, "time", clock)
    stream, report = Stream(make_request(**more), "memory://tokenizer"), StreamReport(meter)
    with capture_logs() as logs:
        report.received(stream.request)
        for pause in pauses:
            clock.seconds += pause
            report.progressed()
        for index in range(len(stream.sequences)):
            stream.accept(last_news("x" * len(tokens), tokens, index))
        report.finished(stream)
    return dict(logs[-1]), meter


def test_times_are_milliseconds_with_three_places(monkeypatch: pytest.MonkeyPatch) -> None:
    line, _ = finished_line(monkeypatch, (0.0012344, 0.1), [1, 2])
    assert (line["ttft_ms"], line["e2e_ms"], line["tpot_ms"]) == (1.234, 101.234, 100.0)


def test_of_output_that_is_read_at_its_end_no_times_between_outputs_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, meter = finished_line(monkeypatch, (1.0, 2.0), [1, 2, 3], is_gathered=True)
    assert line["itl_max_ms"] is None and sum(meter.histograms["itl"].counts) == 0
    assert line["tpot_ms"] == 1000.0 and meter.histograms["tpot"].sum == 1.0


def test_a_single_token_has_no_time_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    line, meter = finished_line(monkeypatch, (1.0,), [1])
    assert line["tpot_ms"] is None and line["itl_max_ms"] == 0.0
    assert sum(meter.histograms["tpot"].counts) == 0 and sum(meter.histograms["itl"].counts) == 0


def test_the_time_per_token_is_of_one_sequence_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    line, meter = finished_line(monkeypatch, (1.0, 2.0), [1, 2, 3], n=2)
    assert line["completion_tokens"] == 6 and line["tpot_ms"] == 1000.0
    assert meter.histograms["tpot"].sum == 1.0 and meter.histograms["n"].sum == 2.0


def test_an_account_of_time_goes_into_line_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = SetClock(), RequestMeter("m")
    monkeypatch.setattr(module, "time", clock)
    stream, report = Stream(make_request(), "memory://tokenizer"), StreamReport(meter)
    now = [100.0]
    stream.latency = StreamLatency(100.0, lambda: now[0])
    stream.latency.sent()
    misses = [4] + [0] * (NUM_MISSES - 1)
    counts = LatencyBreakdown([0] * NUM_PHASES, 100.0, num_preemptions=2, misses=misses)
    now[0] = 100.5
    stream.latency.heard(msgspec.structs.replace(last_news("a", [1]), latency=counts), 100.5, 100.5)
    with capture_logs() as logs:
        report.opened(stream)
        stream.accept(last_news("a", [1]))
        report.finished(stream)
        report.failed(RequestError("too many", field="n", code=RejectCode.RESOURCE_EXHAUSTED))
        report.failed(RequestError("went away", code=RejectCode.CANCELLED))
        report.cancelled(expired=True)
        report.cancelled(expired=False)
    assert dict(meter.phases) == {"to_gateway": 500_000} and dict(meter.misses) == {"below_block": 4}
    assert meter.histograms["preemptions"].sum == 2.0
    events = [(line["event"], line["status"], line["phases"]) for line in logs]
    phases = {"to_gateway": 500.0}
    assert events == [
        ("request_finished", "OK", phases), ("request_failed", "RESOURCE_EXHAUSTED", phases),
        ("request_cancelled", "CANCELLED", phases), ("request_cancelled", "DEADLINE_EXCEEDED", phases),
        ("request_cancelled", "CANCELLED", phases),
    ]  # fmt: skip
    assert logs[1]["field"] == "n" and logs[1]["reason"] == "n: too many"
    assert dict(meter.failures) == {"RESOURCE_EXHAUSTED": 1, "CANCELLED": 2, "DEADLINE_EXCEEDED": 1}


def test_a_call_that_never_opened_has_a_line_without_phases() -> None:
    with capture_logs() as logs:
        StreamReport(RequestMeter("m")).cancelled(expired=False)
    assert "phases" not in logs[0] and logs[0]["e2e_ms"] >= 0.0


def test_a_call_begins_when_its_client_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, request = SetClock(), make_request()
    monkeypatch.setattr(module, "time", clock)
    early = msgspec.structs.replace(request.header, sent_time=SENT - 3.0)
    with capture_logs() as logs:
        for header in (request.header, early):
            report = StreamReport(RequestMeter("m"))
            report.received(msgspec.structs.replace(request, header=header))
            report.cancelled(expired=False)
    assert [line["e2e_ms"] for line in logs if line["event"] == "request_cancelled"] == [0.0, 3000.0]
    assert {line["operation"] for line in logs if line["event"] == "request_received"} == {"text_completion"}


def test_a_call_that_returns_attaches_once_and_then_sends_its_request() -> None:
    returning = Stream(make_request(), "memory://tokenizer", [Position(2, 3)])
    assert isinstance(returning.next_request, AttachRequest)
    returning.is_resumed = True
    assert isinstance(returning.next_request, TokenizeRequest)
    assert isinstance(Stream(make_request(), "memory://tokenizer").next_request, TokenizeRequest)


def test_the_time_that_is_left_is_sent() -> None:
    request = make_request()
    header = msgspec.structs.replace(request.header, deadline=steady_time() + 60.0)
    stream = Stream(msgspec.structs.replace(request, header=header), "memory://tokenizer")
    left = stream.next_request.header.time_left  # type: ignore[union-attr]
    assert left is not None and 50.0 < left <= 60.0
