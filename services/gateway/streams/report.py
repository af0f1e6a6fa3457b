"""The log lines of one Generate call: how it went and how long it took, never what was said."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog

from services.gateway.bus.refusals import details
from services.gateway.streams.stream import Stream
from shared.errors import RejectCode, RequestError
from shared.exposition import RequestMeter
from shared.messages import TokenizeRequest
from shared.metrics.latency import tpot
from shared.processes.logging import request_logger

log = structlog.get_logger()


class StreamReport:
    """Keeps the times of one call; each call ends with exactly one line, and counts once in the metrics."""

    def __init__(self, meter: RequestMeter) -> None:
        self._meter = meter
        self._start = time.perf_counter()
        self._first = 0.0
        self._last = 0.0
        self._longest = 0.0  # between two outputs
        self._is_gathered = False  # what is between two outputs is the scheduler's choice
        self._stream: Stream | None = None
        self._log = log

    def received(self, request: TokenizeRequest) -> None:
        params, header = request.params, request.header
        begin = header.sent_time or header.arrival_time  # when it was begun to be read
        self._start = time.perf_counter() - (time.time() - begin)
        self._log = request_logger(log, header)
        self._is_gathered = header.is_gathered
        self._log.info(
            "request_received",
            label=header.label,
            tenant=header.tenant,
            parent_span_id=header.parent_span_id,
            model=self._meter.model,
            operation="text_completion" if request.chat is None else "chat",
            n=params.n,
            max_tokens=params.max_tokens,
        )

    def opened(self, stream: Stream) -> None:
        """It was let in, and is on its way."""
        self._stream = stream

    def progressed(self) -> None:
        """Output came."""
        before, self._last = self._last, time.perf_counter()
        if before:
            if not self._is_gathered:
                gap = self._last - before
                self._longest = max(self._longest, gap)
                self._meter.itl.observe(gap)
        else:
            self._first = self._last

    def finished(self, stream: Stream) -> None:
        num_tokens = stream.num_output_tokens
        per_sequence = num_tokens / len(stream.sequences)
        elapsed = self._elapsed()
        account = stream.latency.finished_fields() if stream.latency is not None else {}
        self._count(stream, account)
        self._log.info(
            "request_finished",
            status="OK",
            prompt_tokens=stream.num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=stream.num_cached_tokens,
            num_draft_tokens=stream.num_draft_tokens,
            num_accepted_tokens=stream.num_accepted_tokens,
            ttft_ms=_ms(self._first - self._start),
            tpot_ms=_ms((self._last - self._first) / (per_sequence - 1)) if per_sequence > 1 else None,
            itl_max_ms=None if self._is_gathered else _ms(self._longest),
            e2e_ms=elapsed,
            finish_reason=stream.finish_reason,
            **account,
        )

    def failed(self, error: RequestError) -> None:
        event = "request_cancelled" if error.code is RejectCode.CANCELLED else "request_failed"
        self._meter.failures[error.code.name] += 1
        self._ended(event, status=error.code.name, field=error.field, reason=details(error))

    def cancelled(self, *, expired: bool) -> None:
        """The client went away, or stopped waiting."""
        status = "DEADLINE_EXCEEDED" if expired else "CANCELLED"
        self._meter.failures[status] += 1
        self._ended("request_cancelled", status=status)

    def _ended(self, event: str, **fields: str) -> None:
        latency = self._stream.latency if self._stream is not None else None
        account = latency.fields() if latency is not None else {}
        self._log.info(event, **fields, e2e_ms=self._elapsed(), **account)

    def _count(self, stream: Stream, account: Mapping[str, Any]) -> None:
        meter, params = self._meter, stream.request.params
        meter.successes[stream.finish_reason] += 1
        first, last = self._first - self._start, self._last - self._start
        meter.observe("ttft", first)
        meter.observe("tpot", tpot(first, last, stream.num_output_tokens // len(stream.sequences)))
        meter.observe("e2e", time.perf_counter() - self._start)
        meter.observe("prompt_tokens", stream.num_prompt_tokens)
        meter.observe("output_tokens", stream.num_output_tokens)
        meter.observe("n", params.n)
        meter.observe("max_tokens", params.max_tokens)
        if account:
            meter.spent(account.get("phases", {}))
            meter.missed(account.get("misses", {}))
            meter.observe("preemptions", account.get("num_preemptions"))

    def _elapsed(self) -> float:
        return _ms(time.perf_counter() - self._start)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
