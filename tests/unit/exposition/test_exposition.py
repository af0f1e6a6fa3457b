"""Metrics as Prometheus reads them: names, types, buckets, and what docs/reference/metrics.md says of them."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.scheduler.load import load_of
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.scheduler.telemetry.steplog import StepMeter
from shared.exposition import (
    BatchMeter,
    EngineCollector,
    ProcessState,
    RequestMeter,
    ServiceCollector,
    Shelf,
    StoreCollector,
    StoreState,
    exposition,
)
from shared.exposition.engine import FINGERPRINT
from shared.exposition.server import MetricsServer
from shared.messages import Load, Member, ServiceName
from shared.metrics.histogram import STEP_TOKENS, Histogram, quantile
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
NAME = re.compile(r"(vllm:|pageant_)[a-z0-9_]+")
# What dashboards for vLLM and the Kubernetes inference gateway read.
EXPECTED = {
    "gauge": ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"],
    "counter": [
        "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens",
        "vllm:generation_tokens", "vllm:request_success", "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ],
    "histogram": [
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_time_per_output_token_seconds", "vllm:request_queue_time_seconds",
        "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
        "vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:iteration_tokens_total",
    ],
}  # fmt: skip


def load() -> Load:
    """Of a core that has worked."""
    world, meter = World(Policy(max_num_batched_tokens=32)), StepMeter()
    for index in range(5):
        world.add(f"r{index}", [1, 2, 3] * (index + 1), max_tokens=4)
    while world.step():
        for plan in world.trace:
            meter.tokens.observe(sum(plan.num_scheduled_tokens))
        world.trace.clear()
    return load_of(world.scheduler, "", meter.tokens)


def meter() -> RequestMeter:
    filled = RequestMeter("tiny")
    for seconds in (0.004, 0.02, 0.5, 9999.0):
        filled.observe("ttft", seconds)
        filled.itl.observe(seconds)
    filled.successes["stop"] += 2
    filled.failures["CANCELLED"] += 1
    filled.spent({"queue_blocks": 250.0, "queue_step": 50.0, "prefill": 20.0, "decode": 80.0, "preempted": 10.0})
    filled.missed({"evicted": 48, "below_block": 3})
    return filled


def state() -> ProcessState:
    members = [Member(ServiceName.WORKER, f"w{index}", "", 1) for index in range(2)]
    return ProcessState("scheduler", "scheduler-1", 1_700_000_000.0, 7, 1, 2, "READY", False, members, {"log": 5})


def text() -> str:
    shelf = Shelf(num_blocks=1, num_bytes=100, max_bytes=1000, num_served=2)
    store = StoreCollector(StoreState("store-1", {"memory": shelf, "disk": shelf}, num_links=1))
    service = ServiceCollector(state())
    return exposition(EngineCollector("tiny", load()), meter(), BatchMeter("tiny"), store, service).decode()


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text())}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


def test_names_and_types_are_those_that_dashboards_read(families: dict[str, Metric]) -> None:
    for kind, names in EXPECTED.items():
        for name in names:
            assert name in families and families[name].type == kind, name
            for sample in families[name].samples:
                assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"


def test_names_are_names_and_everything_is_described(families: dict[str, Metric]) -> None:
    for family in families.values():
        assert NAME.fullmatch(family.name) and family.documentation.endswith(".")
        assert family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            assert sample.name.startswith(family.name)
            assert family.type != "counter" or sample.name.endswith("_total")
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)


def test_nothing_is_told_twice() -> None:
    series = [line.rpartition(" ")[0] for line in text().splitlines() if line and not line.startswith("#")]
    assert len(series) == len(set(series)) > 200
    helps = [line.split()[2] for line in text().splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


def test_histograms_add_up(families: dict[str, Metric]) -> None:
    for family in families.values():
        if family.type != "histogram":
            continue
        buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
        bounds, counts = [float(bound) for bound, _ in buckets], [count for _, count in buckets]
        assert buckets[-1][0] == "+Inf"
        assert all(a < b for a, b in pairwise(bounds)) and all(a <= b for a, b in pairwise(counts))
        (total,) = [s.value for s in family.samples if s.name.endswith("_count")]
        assert total == counts[-1]


def test_values(families: dict[str, Metric]) -> None:
    assert sum(values(families["vllm:generation_tokens"]).values()) == 20
    assert sum(values(families["vllm:request_success"]).values()) == 2
    phases = values(families["pageant_request_phase_seconds"])
    assert phases["pageant_request_phase_seconds_total", "0", "tiny", "queue_blocks"] == 0.25
    (lost,) = families["pageant_output_lost"].samples
    assert (lost.labels["output"], lost.value) == ("log", 5)
    queue = {sample.name: sample.value for sample in families["vllm:request_queue_time_seconds"].samples}
    assert queue["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.3)
    inference = {sample.name: sample.value for sample in families["vllm:request_inference_time_seconds"].samples}
    assert inference["vllm:request_inference_time_seconds_sum"] == pytest.approx(0.11)
    steps = {sample.name: sample.value for sample in families["vllm:iteration_tokens_total"].samples}
    assert steps["vllm:iteration_tokens_total_count"] > 0
    assert steps["vllm:iteration_tokens_total_sum"] >= 20


def test_every_worker_says_what_it_computes_with() -> None:
    world = World(workers=0)
    for name, fingerprint in (("w0", "fp_a"), ("w1", "fp_b")):
        world.join(name, msgspec.structs.replace(capacity(), fingerprint=fingerprint))
    told = exposition(EngineCollector("tiny", load_of(world.scheduler, "", StepMeter().tokens))).decode()
    (family,) = (one for one in text_string_to_metric_families(told) if one.name == FINGERPRINT)
    found = {(sample.labels["worker"], sample.labels["fingerprint"], sample.value) for sample in family.samples}
    assert found == {("w0", "fp_a", 1.0), ("w1", "fp_b", 1.0)}


def test_without_a_scheduler_only_that_is_told() -> None:
    told = exposition(EngineCollector("tiny", None)).decode()
    assert 'pageant_scheduler_up{engine="0",model_name="tiny"} 0.0' in told and "vllm:" not in told


def test_every_metric_is_documented_and_nothing_else_is(families: dict[str, Metric]) -> None:
    documented = set(re.findall(r"^\| `((?:vllm:|pageant_)[a-z0-9_]+)`", DOCUMENT.read_text(encoding="utf-8"), re.M))
    told = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
    assert documented == told


def test_quantiles_are_prometheus_s() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.5, 1.5, 3.0):
        histogram.observe(value)
    buckets = [(float(bound), float(count)) for bound, count in histogram.cumulative()]
    assert quantile(buckets, 0.5) == 1.5 and quantile(buckets, 1.0) == 4.0 and quantile(buckets, 0.25) == 1.0
    assert quantile([], 0.5) is None and quantile([(1.0, 0.0)], 0.5) is None
    histogram.observe(100.0, 100)
    assert quantile([(float(b), float(c)) for b, c in histogram.cumulative()], 0.9) == 4.0
    edges = Histogram((1.0, 2.0))
    edges.observe(1.0)  # a bound belongs to its bucket
    assert edges.counts == [1, 0, 0]


async def test_a_service_serves_its_metrics_from_its_loop() -> None:
    core = Scheduler(Policy())
    calls: list[Any] = []

    def collectors() -> list[Any]:
        calls.append(asyncio.get_running_loop())  # fails in a thread without one
        return [ServiceCollector(state()), EngineCollector("tiny", load_of(core, "", Histogram(STEP_TOKENS)))]

    server = MetricsServer("127.0.0.1", 0, collectors)
    try:
        told = await asyncio.to_thread(read, f"http://127.0.0.1:{server.port}/metrics")
    finally:
        await asyncio.to_thread(server.close)
    assert calls == [asyncio.get_running_loop()]
    names = {family.name for family in text_string_to_metric_families(told)}
    assert {"pageant_process_info", "vllm:num_requests_running", "process_cpu_seconds"} <= names


def read(url: str) -> str:
    """As Prometheus asks: it would rather have OpenMetrics."""
    wanted = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=wanted), timeout=5) as answer:
        return str(answer.read().decode())


async def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def getfqdn(name: str = "") -> str:
        asked.append(name)
        return name

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    server = MetricsServer("0.0.0.0", 0, lambda: [ServiceCollector(state())])
    try:
        told = await asyncio.to_thread(read, f"http://127.0.0.1:{server.port}/metrics")
    finally:
        await asyncio.to_thread(server.close)
    assert "pageant_process_info" in told and not asked


async def test_connections_without_a_request_do_not_keep_a_scrape_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.exposition.server.MAX_CONNECTIONS", 4)
    monkeypatch.setattr("shared.exposition.server.MAX_SECONDS", 0.2)
    server = MetricsServer("127.0.0.1", 0, lambda: [ServiceCollector(state())])
    idle: list[socket.socket] = []
    try:
        for _ in range(12):
            idle.append(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", server.port), 5))
        async with asyncio.timeout(10):
            while len(server._server._since) < 4:
                await asyncio.sleep(0.01)
        assert len(server._server._since) == 4, "no more threads than that"
        await asyncio.sleep(0.3)
        told = await asyncio.to_thread(read, f"http://127.0.0.1:{server.port}/metrics")
        assert "pageant_process_info" in told
    finally:
        for connection in idle:
            connection.close()
        await asyncio.to_thread(server.close)


def test_the_cache_s_size_is_told_where_it_is_known() -> None:
    cache = {"block_size": "16"}
    for max_model_len, wanted in ((512, ('kv_cache_size_tokens="', 'kv_cache_max_concurrency="')), (0, ())):
        told = exposition(EngineCollector("tiny", load(), cache, max_model_len)).decode()
        (line,) = [one for one in told.splitlines() if one.startswith("vllm:cache_config_info{")]
        num_blocks = int(line.partition('num_gpu_blocks="')[2].partition('"')[0])
        assert f'kv_cache_size_tokens="{16 * num_blocks}"' in line and all(word in line for word in wanted)
        assert (f'kv_cache_max_concurrency="{16 * num_blocks / 512:.2f}"' in line) is bool(max_model_len)
