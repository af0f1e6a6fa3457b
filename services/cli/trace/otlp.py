"""Requests as OpenTelemetry spans with the GenAI attribute names, sent over OTLP/HTTP in its JSON encoding.

Each request is a span of kind SERVER, with a child for each phase.  It belongs to its caller's trace where that sent a
W3C `traceparent`, and its own id is the one that the gateway gave back in its `traceparent`: the beginning of the
request's id.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import msgspec

from services.cli.trace.requests import RequestTrace

PROVIDER = "pageant"
KIND_INTERNAL, KIND_SERVER, STATUS_ERROR = 1, 2, 2  # numbers of the protocol
BATCH = 512  # spans in one call
TIMEOUT = 10.0  # seconds
ATTRIBUTES = {  # field of the log -> attribute
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "n": "gen_ai.request.choice.count",
    "max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.request.model",
}


def export(traces: Iterable[RequestTrace], url: str) -> int:
    """Send all requests that have ended to a collector; returns the number of spans.  Raises OSError.

    Headers, such as a key, are taken from OTEL_EXPORTER_OTLP_HEADERS: name=value,name=value.
    """
    endpoint = url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if pair)
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs} | {"content-type": "application/json"}
    spans = [span for trace in traces if trace.is_over for span in spans_of(trace)]
    resource = {"attributes": [attribute("service.name", PROVIDER)]}
    for first in range(0, len(spans), BATCH):
        scopes = [{"scope": {"name": PROVIDER}, "spans": spans[first : first + BATCH]}]
        body = msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})
        request = urllib.request.Request(endpoint, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            pass
    return len(spans)


def spans_of(trace: RequestTrace) -> list[dict[str, Any]]:
    """One request's spans, its own first."""
    values = attributes(trace)
    trace_id = hexadecimal(trace.trace_id) or hexadecimal(trace.request_id) or 1
    own = hexadecimal(trace.request_id[:16]) or 1  # as in the gateway's `traceparent`
    caller = hexadecimal(str(trace.received.fields.get("parent_span_id", ""))) if trace.received is not None else 0

    def span(span_id: int, parent: int, name: str, start_ms: float, end_ms: float, kind: int) -> dict[str, Any]:
        begin = int(trace.start * 1e9)
        made = {
            "traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}", "name": name, "kind": kind,
            "startTimeUnixNano": str(begin + int(start_ms * 1e6)), "endTimeUnixNano": str(begin + int(end_ms * 1e6)),
        }  # fmt: skip
        return made | ({"parentSpanId": f"{parent:016x}"} if parent else {})

    name = f"{values['gen_ai.operation.name']} {values.get('gen_ai.request.model', '')}".strip()
    root = span(own, caller, name, 0.0, trace.e2e_ms, KIND_SERVER)
    root["attributes"] = [attribute(name, value) for name, value in values.items()]
    if trace.status != "OK":
        root["status"] = {"code": STATUS_ERROR, "message": str(trace.end.get("reason", trace.status))}
    children = (
        span(own ^ place, own, phase.phase, phase.start, phase.end, KIND_INTERNAL)
        for place, phase in enumerate(trace.spans, 1)
    )
    return [root, *children]


def attributes(trace: RequestTrace) -> dict[str, Any]:
    """By the GenAI conventions, and names of ours where they have none."""
    fields = (trace.received.fields if trace.received is not None else {}) | dict(trace.end)
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


def attribute(name: str, value: Any) -> dict[str, Any]:
    """Name and value in the protocol's JSON, in which 64-bit integers are strings."""
    return {"key": name, "value": _typed(value)}


def _typed(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_typed(one) for one in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def hexadecimal(digits: str) -> int:
    """0 where they are none."""
    try:
        return int(digits, 16)
    except ValueError:
        return 0
