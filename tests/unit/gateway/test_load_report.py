"""Load reports for balancers, and traces passed on: only to those who ask, over either front."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from protos.pageant.v1 import inference_pb2, load_report_pb2
from services.gateway import servicer
from services.gateway.header import read_metadata
from services.gateway.load_report import BINARY
from shared.messages import GetLoad, Load, WorkerLoad
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST, FakeTroupe, front

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def tell_load(troupe: FakeTroupe) -> None:
    """Answer the gateway's question as a scheduler does."""
    question = await troupe.get(troupe.scheduler, GetLoad)
    zeros: dict[str, Any] = dict.fromkeys(
        ("num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_chunked_prefills",
         "num_prompt_tokens", "num_output_tokens", "num_finished", "num_aborted", "num_rejected"), 0,
    )  # fmt: skip
    workers = [WorkerLoad("w", 3, 100, 60, 0, 9)]
    troupe.tell(Load(question.request_id, 3, 4, workers, kv_cache_usage=0.4, **zeros))


async def complete(h: Any, headers: dict[str, str]) -> Any:
    asked = asyncio.create_task(h.client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers))
    request = await h.troupe.request()
    h.troupe.say(request, "a b", **LAST)
    if "endpoint-load-metrics-format" in headers:
        await tell_load(h.troupe)
    return await asked, request


@pytest.mark.parametrize("wanted", ["TEXT", "text", "JSON"])
async def test_an_answer_tells_the_load_in_the_format_that_was_asked_for(wanted: str) -> None:
    async with http() as h:
        response, _ = await complete(h, {"endpoint-load-metrics-format": wanted})
        kind, _, told = response.headers["endpoint-load-metrics"].partition(" ")
        assert kind == wanted.upper()
        if kind == "JSON":
            assert json.loads(told)["named_metrics"]["kv_cache_usage_perc"] == 0.4
        else:
            values = dict(pair.split("=") for pair in told.split(", "))
            assert values["named_metrics.num_requests_waiting"] == "4.0"
            assert all(float(value) >= 0 for value in values.values())


async def test_nobody_else_is_told_and_nobody_else_pays() -> None:
    async with http() as h:
        response, _ = await complete(h, {})
        assert response.status_code == 200 and "endpoint-load-metrics" not in response.headers
        assert "traceparent" not in response.headers
        assert not any(isinstance(message, GetLoad) for message in h.troupe.seen.get(h.troupe.scheduler.address, []))


async def test_a_grpc_call_gets_a_report_behind_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own core takes `endpoint-load-metrics-bin` for its balancers and hides it; so here it has another name."""
    assert BINARY == "endpoint-load-metrics-bin"
    monkeypatch.setattr(servicer, "BINARY", "x-load-bin")
    async with front() as f:
        request = inference_pb2.GenerateRequest(text="Hi")
        metadata = (("endpoint-load-metrics-format", "BIN"), ("traceparent", PARENT))
        call = f.inference.Generate(request, metadata=metadata)
        asked = await f.troupe.request()
        assert (asked.header.trace_id, asked.header.parent_span_id) == (TRACE, "00f067aa0ba902b7")
        f.troupe.say(asked, "a b", **LAST)
        told = asyncio.create_task(tell_load(f.troupe))
        assert [message.text async for message in call] == ["a b"]
        await told
        trailing = dict(await call.trailing_metadata())
        report = load_report_pb2.LoadReport.FromString(trailing["x-load-bin"])
        assert report.named_metrics["num_requests_running"] == 3.0 and report.application_utilization == 0.4
        initial = dict(await call.initial_metadata())
        assert initial["traceparent"] == f"00-{TRACE}-{asked.header.request_id[:16]}-01"


def test_the_report_is_read_as_orca_s() -> None:
    """The fields' numbers are those of xds.data.orca.v3.OrcaLoadReport: tag 0x42 is field 8, tag 0x49 field 9."""
    data = load_report_pb2.LoadReport(named_metrics={"x": 0.5}, application_utilization=0.25).SerializeToString()
    assert data[0] == 0x42 and data[-9] == 0x49


async def test_a_trace_is_passed_on_over_http() -> None:
    async with http() as h:
        response, request = await complete(h, {"traceparent": PARENT})
        assert request.header.trace_id == TRACE
        assert response.headers["traceparent"] == f"00-{TRACE}-{request.header.request_id[:16]}-01"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        f"00-{TRACE}-0000000000000000-01",
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
    ],
)
def test_a_trace_that_is_none_is_begun_anew(bad: str) -> None:
    call = read_metadata([("traceparent", bad)])
    assert call.parent_span_id == "" and len(call.trace_id) == 32 and call.trace_id != TRACE
