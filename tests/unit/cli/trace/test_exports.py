"""What is written for viewers: the trace-event file, the HTML page, the spans."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from services.cli.main import main
from services.cli.trace.commands import load
from tests.browser import BROWSER, Chromium
from tests.unit.cli.trace.lines import PHASES, many, request

COUNT = 40


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = tmp_path / "services.log"
    file.write_text("\n".join(many(COUNT)), encoding="utf-8")
    return file


def written(logs: Path, option: str, name: str) -> str:
    target = logs.with_name(name)
    done = CliRunner().invoke(main, ["trace", "--logs", str(logs), option, str(target)])
    assert done.exit_code == 0, done.output
    return target.read_text(encoding="utf-8")


@pytest.fixture
def events(logs: Path) -> list[dict[str, Any]]:
    file = json.loads(written(logs, "--perfetto", "out.json"))
    assert file.keys() == {"traceEvents", "displayTimeUnit"}
    found: list[dict[str, Any]] = file["traceEvents"]
    return found


def test_events_follow_the_format(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event["ph"] in "MXCstf" and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] in "stf":
            assert event["id"] and event["cat"]


def test_processes_and_threads_are_named(events: list[dict[str, Any]]) -> None:
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name" and e["args"]["name"]}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        assert event["pid"] in processes
        if event["ph"] in "Xstf":
            assert (event["pid"], event["tid"]) in threads
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"{name}-1a2b" for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")}


def test_every_flow_has_both_ends_in_slices(events: list[dict[str, Any]]) -> None:
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(flows) == COUNT
    for points in flows.values():
        points.sort(key=lambda event: event["ts"])
        kinds = [event["ph"] for event in points]
        assert kinds[0] == "s" and kinds[-1] == "f" and set(kinds[1:-1]) == {"t"}
        for event in points:
            around = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in around)


def test_slices_of_a_thread_nest(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for found in threads.values():
        open_ends: list[float] = []
        for start, negated in sorted(found):
            while open_ends and open_ends[-1] <= start + 0.01:
                open_ends.pop()
            assert not open_ends or start - negated <= open_ends[-1] + 0.01
            open_ends.append(start - negated)


def test_counts_match_the_log(events: list[dict[str, Any]]) -> None:
    categories = Counter(event.get("cat") for event in events if event["ph"] == "X")
    assert categories["step"] == 2 * COUNT
    gateway = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith("gateway"))
    assert sum(e["ph"] == "X" and e["cat"] == "request" and e["pid"] == gateway for e in events) == COUNT
    spent = Counter[str]()
    for event in events:
        if event.get("cat") == "phase":
            spent[event["name"]] += event["dur"] / 1000
    for phase in ("tokenise", "queue_step", "prefill", "detokenise", "client_blocked"):
        assert spent[phase] == pytest.approx(COUNT * PHASES[phase], rel=1e-3), phase
    step = next(event for event in events if event.get("cat") == "step")
    assert step["name"] == "step 0: 2 sequences, 6 tokens" and step["args"]["sequences"]["ffffffff.0"] == 5


def test_the_page_is_whole_in_itself(logs: Path) -> None:
    page = written(logs, "--html", "out.html")
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(|<script|<!--", page)
    assert "default-src 'none'" in page and page.count('class="row"') == COUNT
    assert page.count("<title>step ") == 2 * COUNT and "no free blocks, 14 requests ahead" in page
    for phase in PHASES:
        assert page.count(f'title="{phase}: ') >= COUNT * 6 // 7, phase


def test_a_label_is_text_in_the_page(tmp_path: Path) -> None:
    file = tmp_path / "one.log"
    file.write_text("\n".join(request("a" * 32, label="<b>&'\"<!--rows-->")), encoding="utf-8")
    page = written(file, "--html", "out.html")
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "<!--" not in page


@pytest.mark.skipif(not BROWSER, reason="needs a Chromium (PAGEANT_TEST_BROWSER)")
def test_the_page_draws_what_is_in_it(logs: Path, tmp_path: Path) -> None:
    """PAGEANT_SCREENSHOTS names a folder for pictures."""
    written(logs, "--html", "out.html")
    browser = Chromium(tmp_path / "chromium")
    page = browser.open(logs.with_name("out.html").as_uri(), 1200, 1500)
    assert page.count("#rows .row") == COUNT
    assert page.count("svg.timeline") == 1 and page.count("#totals i.bar") == len(PHASES)
    cause = "[...document.querySelectorAll('#rows .cause')][3]"
    assert not page.run(f"{cause}.checkVisibility()")
    page.run("document.querySelectorAll('#rows summary')[3].click()")
    assert "no free blocks" in page.run(f"{cause}.innerText")
    if folder := os.environ.get("PAGEANT_SCREENSHOTS"):
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            page.picture(Path(folder) / f"trace-{scheme}.png")
    assert not page.faults()
    assert all(request["url"].startswith(("file:", "data:", "about:")) for request in page.requests())
    browser.close()


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent to it."""

    received: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []  # path, key, body

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.received.append((self.path, self.headers["x-key"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_spans_have_the_conventions_names(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20secret")
    monkeypatch.setattr(Collector, "received", [])
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = CliRunner().invoke(main, ["trace", "--logs", str(logs), "--otlp", url])
        server.shutdown()
    assert done.exit_code == 0, done.output
    assert {(path, key) for path, key, _ in Collector.received} == {("/v1/traces", "a secret")}
    (resources,) = zip(*(body["resourceSpans"] for _, _, body in Collector.received), strict=True)
    spans = [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]
    assert f"{len(spans)} spans sent" in done.output and len(Collector.received) > 1
    trace = load((str(logs),)).traces[7]
    root, *children = (span for span in spans if span["traceId"] == trace.trace_id)
    known = {one["key"]: one["value"] for one in root["attributes"]}
    assert known["gen_ai.usage.input_tokens"] == {"intValue": "812"}
    assert known["gen_ai.usage.output_tokens"] == {"intValue": "64"}
    assert known["gen_ai.operation.name"] == {"stringValue": "text_completion"} and root["name"] == "text_completion"
    assert root["spanId"] == trace.request_id[:16] or int(trace.request_id[:16], 16) == 0
    spent = (int(root["endTimeUnixNano"]) - int(root["startTimeUnixNano"])) / 1e6
    assert spent == pytest.approx(trace.e2e_ms, abs=0.01)
    assert [child["name"] for child in children] == [span.phase for span in trace.spans]
    assert all(child["parentSpanId"] == root["spanId"] for child in children)
    assert len({span["spanId"] for span in (root, *children)}) == 1 + len(children)


def test_a_collector_that_is_not_there_ends_the_command(logs: Path) -> None:
    done = CliRunner().invoke(main, ["trace", "--logs", str(logs), "--otlp", "http://127.0.0.1:9"])
    assert isinstance(done.exception, OSError)
    done = CliRunner().invoke(main, ["trace", "--logs", str(logs), "--otlp", "collector:4318"])
    assert done.exit_code == 1 and "--otlp" in done.output
