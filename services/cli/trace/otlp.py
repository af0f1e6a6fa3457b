"""Requests as OpenTelemetry spans with the GenAI attribute names, sent over OTLP; needs the extra `otlp`.

Each request is a span of kind SERVER, with a child for each phase.  It belongs to its caller's trace where that sent a
W3C `traceparent`, and its own id is the one that the gateway gave back in its `traceparent`: the beginning of the
request's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.cli.trace.requests import RequestTrace

PROVIDER = "pageant"
ATTRIBUTES = {  # ours, theirs
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "n": "gen_ai.request.choice.count",
    "max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.request.model",
}


def export(traces: Iterable[RequestTrace], url: str) -> int:
    """Send all requests that have ended to a collector, over OTLP/HTTP; returns how many spans that were."""
    endpoint = url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": PROVIDER}), id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=1 << 20))
    count = sum(emit(trace, provider) for trace in traces if trace.is_over)
    provider.shutdown()  # sends what waits
    return count


class Ids(IdGenerator):
    """Gives out ids that are known already: a trace's for its root, and made ones for the phases."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_ids: list[int] = []

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_ids.pop()


def emit(trace: RequestTrace, provider: TracerProvider) -> int:
    """One request's spans; returns how many."""
    tracer, ids = provider.get_tracer(PROVIDER), provider.id_generator
    assert isinstance(ids, Ids)
    ids.trace_id = hexadecimal(trace.trace_id) or hexadecimal(trace.request_id) or 1
    own = span_id(trace.request_id)
    ids.span_ids = [*(own ^ place for place in range(len(trace.spans), 0, -1)), own]
    start = int(trace.start * 1e9)
    values = attributes(trace)
    span = tracer.start_span(
        f"{values['gen_ai.operation.name']} {values.get('gen_ai.request.model', '')}".strip(),
        context=api.set_span_in_context(api.NonRecordingSpan(parent_of(trace, ids.trace_id))),
        kind=SpanKind.SERVER,
        start_time=start,
        attributes=values,
    )
    if trace.status != "OK":
        span.set_status(Status(StatusCode.ERROR, str(trace.end.get("reason", trace.status))))
    within = api.set_span_in_context(span)
    for phase in trace.spans:
        child = tracer.start_span(phase.phase, context=within, start_time=start + int(phase.start * 1e6))
        child.end(start + int(phase.end * 1e6))
    span.end(start + int(trace.e2e_ms * 1e6))
    return 1 + len(trace.spans)


def parent_of(trace: RequestTrace, trace_id: int) -> Any:
    """The caller's span; an invalid one, which makes a root, where there is none."""
    caller = trace.received.fields.get("parent_span_id", "") if trace.received is not None else ""
    return SpanContext(trace_id, hexadecimal(str(caller)), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def attributes(trace: RequestTrace) -> dict[str, Any]:
    """By the GenAI conventions, and ours for what they have no name for."""
    received: Mapping[str, Any] = trace.received.fields if trace.received is not None else {}
    fields = {**received, **trace.end}
    known = {theirs: fields[ours] for ours, theirs in ATTRIBUTES.items() if fields.get(ours) not in (None, "")}
    values: dict[str, Any] = {
        "gen_ai.operation.name": str(fields.get("operation") or "text_completion"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.response.id": trace.request_id,
        **known,
        "pageant.cause": trace.cause,
        "pageant.label": trace.label,
    }
    if (ttft := fields.get("ttft_ms")) is not None:
        values["gen_ai.response.time_to_first_chunk"] = float(ttft) / 1000
    if reason := fields.get("finish_reason"):
        values["gen_ai.response.finish_reasons"] = [str(reason)]
    if trace.status != "OK":
        values["error.type"] = trace.status
    return values


def span_id(request_id: str) -> int:
    """As the gateway tells its callers."""
    return hexadecimal(request_id[:16]) or 1


def hexadecimal(digits: str) -> int:
    """0 where they are none."""
    try:
        return int(digits, 16)
    except ValueError:
        return 0
