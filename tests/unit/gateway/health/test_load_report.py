"""Load reports for balancers, and traces passed on: only to those who ask, over either front."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import h2.connection
import h2.events
import pytest
from google.protobuf.duration_pb2 import Duration

from protos.pageant.v1 import inference_pb2, load_report_pb2
from services.gateway.access.header import read_metadata
from services.gateway.grpc.load_service import SERVICE, interval_of
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


async def raw_trailers(port: int, path: str, message: bytes, headers: list[tuple[str, str]]) -> dict[str, str]:
    """The trailers of one gRPC call as they are on the wire: gRPC's own clients keep a load report to themselves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection()
    connection.initiate_connection()
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "127.0.0.1")]
    connection.send_headers(1, [*pseudo, ("content-type", "application/grpc"), ("te", "trailers"), *headers])
    connection.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    found: dict[str, str] | None = None
    try:
        async with asyncio.timeout(30):
            while found is None:
                writer.write(connection.data_to_send())
                for event in connection.receive_data(await reader.read(65536)):
                    if isinstance(event, h2.events.TrailersReceived):
                        found = {name.decode(): value.decode() for name, value in event.headers}
    finally:
        writer.close()
    return found


async def test_a_grpc_call_gets_a_report_behind_its_stream() -> None:
    """The key is the one that gRPC's balancers read, `endpoint-load-metrics-bin`, in base64 without padding."""
    async with front() as f:
        request = inference_pb2.GenerateRequest(text="Hi").SerializeToString()
        headers = [("endpoint-load-metrics-format", "BIN"), ("traceparent", PARENT)]
        path = "/pageant.v1.Inference/Generate"
        call = asyncio.create_task(raw_trailers(f.troupe.gateway.server.port, path, request, headers))
        asked = await f.troupe.request()
        assert (asked.header.trace_id, asked.header.parent_span_id) == (TRACE, "00f067aa0ba902b7")
        f.troupe.say(asked, "a b", **LAST)
        await tell_load(f.troupe)
        trailers = await call
        assert trailers["grpc-status"] == "0"
        report = load_report_pb2.LoadReport.FromString(base64.b64decode(trailers["endpoint-load-metrics-bin"] + "=="))
        assert report.named_metrics["num_requests_running"] == 3.0 and report.application_utilization == 0.4


async def test_a_stream_carries_its_trace() -> None:
    async with front() as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="Hi"), metadata=(("traceparent", PARENT),))
        asked = await f.troupe.request()
        f.troupe.say(asked, "a b", **LAST)
        assert [message.text async for message in call] == ["a b"]
        initial = dict(await call.initial_metadata())
        assert initial["traceparent"] == f"00-{TRACE}-{asked.header.request_id[:16]}-01"


def open_rca(f: Any, **fields: Any) -> Any:
    """Ask for reports out of band, as a balancer does."""
    method = f.channel.unary_stream(
        f"/{SERVICE}/StreamCoreMetrics",
        request_serializer=load_report_pb2.LoadReportRequest.SerializeToString,
        response_deserializer=load_report_pb2.LoadReport.FromString,
    )
    return method(load_report_pb2.LoadReportRequest(**fields))


async def test_reports_come_out_of_band_at_an_interval() -> None:
    async with front() as f:
        call = open_rca(f, report_interval=Duration(nanos=1))
        for _ in range(2):
            reading = asyncio.create_task(call.read())
            await tell_load(f.troupe)
            report = await reading
            assert report.named_metrics["num_requests_waiting"] == 4.0 and report.application_utilization == 0.4
        call.cancel()


async def test_a_gateway_that_drains_ends_the_reports() -> None:
    async with front(drain_timeout=30.0) as f:
        call = open_rca(f)
        reading = asyncio.create_task(anext(reports := aiter(call)))
        await tell_load(f.troupe)
        await reading
        held = f.inference.Generate(inference_pb2.GenerateRequest(text="Hi"))  # keeps the gateway
        asked = await f.troupe.request()
        f.troupe.gateway.request_drain()
        async with asyncio.timeout(20):
            assert [report async for report in reports] == []
        f.troupe.say(asked, "a", **LAST)
        assert [message.text async for message in held] == ["a"]


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [({}, 30.0), ({"report_interval": Duration(seconds=5)}, 5.0), ({"report_interval": Duration(seconds=-5)}, 1.0)],
)
def test_the_interval_of_reports_has_a_default_and_a_floor(asked: dict[str, Any], seconds: float) -> None:
    assert interval_of(load_report_pb2.LoadReportRequest(**asked)) == seconds


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
