"""A real Prometheus scrapes every service of a real troupe, and reads what dashboards ask for.

PAGEANT_TEST_PROMETHEUS names the program where it is not in PATH (Debian: apt install prometheus); promtool beside it
judges the names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.supervision.processes import METRICS_PORTS, PLACES
from tests.system.harness import Troupe, ask, free_port, troupe
from tests.unit.deploy.rendering import ROOT, render

PROMETHEUS = os.environ.get("PAGEANT_TEST_PROMETHEUS") or shutil.which("prometheus")
NAMESPACE = "pageant"  # of Kubernetes, where Prometheus's operator adds it to what a pod tells
OBSERVABILITY = Path(__file__).resolve().parents[3] / "observability"

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (PAGEANT_TEST_PROMETHEUS)")
NUM_STREAMS = 12
OURS = (  # what promtool objects to in names that are vLLM's
    re.compile(r"vllm:\S+ metric names should not contain ':'"),
    re.compile(r"vllm:iteration_tokens_total non-counter metrics should not have \"_total\" suffix"),
    re.compile(r"(python|process)_\S+ "),
)


def first_port() -> int:
    """The first of as many free ones as a troupe may use."""
    while True:
        port = free_port()
        if port < 65000 - METRICS_PORTS * len(PLACES):
            return port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Troupe, dict[str, int]]]:
    port = first_port()
    options = ["--num-blocks", "256", "--num-threads", "1", "--metrics-port", str(port), "--draft", "ngram"]
    options += ["--store-memory", "16MiB"]
    with troupe(tmp_path_factory.mktemp("metrics"), *options) as started:
        yield started, {service: port + METRICS_PORTS * place for place, service in enumerate(PLACES)}


@contextmanager
def prometheus(directory: Path, ports: dict[str, int]) -> Iterator[str]:
    """A Prometheus that scrapes these ports; yields its address."""
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"service_name": name, "namespace": NAMESPACE}}
        for name, port in ports.items()
    ]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "pageant", "static_configs": targets}],
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config), encoding="utf-8")  # which is YAML too
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen([str(PROMETHEUS), *options, "--log.level=error"])
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def dashboard_queries() -> list[str]:
    dashboard = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "pageant.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [expression.replace("$__rate_interval", "30s") for expression in queries]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def query(server: str, expression: str) -> float | None:
    found = get(f"{server}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["data"]["result"]
    return float(found[0]["value"][1]) if found else None


def eventually(value: Any, wanted: Any) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            found = value()
        except OSError:
            found = None
        if wanted(found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.3)


def test_a_real_prometheus_scrapes_every_service(running: tuple[Troupe, dict[str, int]], tmp_path: Path) -> None:
    started, ports = running
    with prometheus(tmp_path, ports) as server:
        eventually(lambda: query(server, "sum(up)"), lambda found: found == len(ports))
        started.generate([ask("Once upon a time", max_tokens=20, ignore_eos=True) for _ in range(8)])
        eventually(lambda: query(server, "sum(vllm:generation_tokens_total)"), lambda found: found == 160)
        eventually(lambda: query(server, 'sum(vllm:request_success_total{finished_reason="length"})'), lambda f: f == 8)
        eventually(lambda: query(server, "sum(pageant_request_phase_seconds_total)"), bool)
        quantile = "histogram_quantile(0.9, sum by (le) (vllm:time_to_first_token_seconds_bucket))"
        first = query(server, quantile)
        assert first is not None and 0 < first < 60
        for expression in dashboard_queries():
            query(server, expression)  # raises where Prometheus cannot read it
        shares = "sum by (phase) (rate(pageant_request_phase_seconds_total[30s]))"
        eventually(lambda: query(server, shares), lambda found: found is not None)  # a rate needs two scrapes
        names = {entry["labels"]["service_name"] for entry in get(f"{server}/api/v1/targets")["data"]["activeTargets"]}
        assert names == set(PLACES)


def test_the_autoscaler_s_queries_follow_the_load(running: tuple[Troupe, dict[str, int]], tmp_path: Path) -> None:
    """deploy/components/autoscaling: each query yields one number, which is what it is meant to be."""
    started, ports = running
    queries = {
        (one["metadata"]["name"], trigger["name"]): trigger["metadata"]["query"]
        for one in render(ROOT / "example")
        if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
    }
    enough = threading.Event()

    def keep_asking() -> None:
        while not enough.is_set():
            started.generate([ask("Once upon a time", max_tokens=200, ignore_eos=True) for _ in range(NUM_STREAMS)])

    with prometheus(tmp_path, ports) as server, ThreadPoolExecutor(1) as pool:

        def value(service: str, trigger: str) -> float | None:
            expression = queries[f"pageant-{service}", trigger]
            found = get(f"{server}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["data"]["result"]
            assert len(found) <= 1, "an autoscaler takes one number"
            return float(found[0]["value"][1]) if found else None

        eventually(lambda: value("worker", "in-flight"), lambda found: found == 0)
        asking = pool.submit(keep_asking)
        try:
            eventually(lambda: value("worker", "in-flight"), lambda found: found == NUM_STREAMS)
            eventually(lambda: value("gateway", "streams"), lambda found: found == NUM_STREAMS)
            eventually(lambda: value("worker", "blocks"), lambda found: 0 < (found or 0) < 1)
            for service in ("tokenizer", "detokenizer"):
                eventually(lambda service=service: value(service, "cores"), lambda found: 0 < (found or 0) < 2)
        finally:
            enough.set()
            asking.result()
        eventually(lambda: value("worker", "in-flight"), lambda found: found == 0)
    assert len(queries) == 5


def test_promtool_finds_nothing_but_what_is_vllm_s(running: tuple[Troupe, dict[str, int]]) -> None:
    _, ports = running
    tool = Path(str(PROMETHEUS)).with_name("promtool")
    if not tool.exists():
        pytest.skip("there is no promtool beside Prometheus")
    for port in ports.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            done = subprocess.run([tool, "check", "metrics"], input=answer.read(), capture_output=True, check=False)
        told = [line for line in (done.stdout + done.stderr).decode().splitlines() if line]
        assert [line for line in told if not any(known.match(line) for known in OURS)] == []


def test_the_gateway_s_own_port_tells_everything_at_once(running: tuple[Troupe, dict[str, int]]) -> None:
    started, _ = running
    with urllib.request.urlopen(f"{started.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "vllm:num_requests_running{" in text and "vllm:time_to_first_token_seconds_bucket{" in text


def test_the_profile_s_configuration_is_one() -> None:
    tool = Path(str(PROMETHEUS)).with_name("promtool")
    if not tool.exists():
        pytest.skip("there is no promtool beside Prometheus")
    file = OBSERVABILITY / "prometheus.yml"
    done = subprocess.run([tool, "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
