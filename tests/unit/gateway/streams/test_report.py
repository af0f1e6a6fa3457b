"""What a call's line and the metrics say of its times and counts, with a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.streams import report as module
from services.gateway.streams.report import StreamReport
from services.gateway.streams.stream import Position, Stream
from shared.clock import steady_time
from shared.exposition import RequestMeter
from shared.messages import AttachRequest, FinishReason, RequestHeader, SequenceText, TokenizeRequest
from shared.sampling import SamplingParams

SENT = 5000.0  # wall time at which the client sent its request


@dataclass
class SetClock:
    """Stands in for the module `time`."""

    seconds: float = 100.0

    def perf_counter(self) -> float:
        return self.seconds

    def time(self) -> float:
        return SENT


def make_request(**params: Any) -> TokenizeRequest:
    header = RequestHeader("r", "memory://gateway", arrival_time=SENT)
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
