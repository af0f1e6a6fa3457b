"""`pageant top` over two scrapes of made-up metrics."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from services.cli.display.top import MetricsSample, View, lines
from services.cli.main import main
from shared.exposition import EngineCollector, ProcessState, RequestMeter, ServiceCollector, exposition
from shared.messages import Load, Member, ServiceName, WorkerLoad


def scrape(at: float, *, num_tokens: int, times: list[float], members: int = 2, steps: int = 100) -> MetricsSample:
    worker = WorkerLoad("worker-1", 3, 100, 30, 20, steps)
    zeros: dict[str, Any] = dict.fromkeys(("num_chunked_prefills", "num_finished", "num_aborted", "num_rejected"), 0)
    load = Load(
        "", 3, 4, [worker], num_preemptions=2, num_prefix_cache_queries=200, num_prefix_cache_hits=50,
        num_prompt_tokens=10, num_output_tokens=num_tokens, kv_cache_usage=0.5, num_drafts=5, num_draft_tokens=20,
        num_accepted_tokens=15, **zeros,
    )  # fmt: skip
    meter = RequestMeter("tiny")
    for seconds in times:
        meter.observe("ttft", seconds)
    gateways = [Member(ServiceName.GATEWAY, f"g{index}", "", 1) for index in range(members)]
    state = ProcessState("gateway", "g0", 1, 5, 0, 0, "READY", False, gateways)
    text = exposition(EngineCollector("tiny", load), meter, ServiceCollector(state))
    return MetricsSample(text.decode(), at)


def shown(now: MetricsSample, before: MetricsSample | None = None) -> str:
    return "\n".join(lines(View(now, before)))


def test_what_is_shown() -> None:
    before = scrape(10.0, num_tokens=100, times=[5.0] * 10)
    now = scrape(12.0, num_tokens=500, times=[5.0] * 10 + [0.05] * 100, steps=150)
    text = shown(now, before)
    assert "gateway 2" in text and "scheduler 1" in text
    assert "running      3   waiting      4" in text
    assert "50.0 %" in text and "25.0 %" in text and "accepted  75.0 %" in text
    assert "200.0 out" in text and "25.0" in text.splitlines()[-1]
    (ttft,) = [line for line in text.splitlines() if line.startswith("TTFT")]
    assert ttft.split()[1:] == ["50.0", "ms", "58.0", "ms", "59.8", "ms"]  # of what came lately, not of the ten before


def test_without_a_scrape_before_it_counts_from_the_start() -> None:
    text = shown(scrape(10.0, num_tokens=100, times=[5.0] * 10))
    assert "0.0 out" in text and "TTFT" in text


def test_a_scheduler_that_is_gone_is_said() -> None:
    meter = RequestMeter("tiny")
    assert "no scheduler answers" in shown(
        MetricsSample(exposition(EngineCollector("tiny", None), meter).decode(), 1.0)
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "file:///etc/passwd"])
def test_where_nobody_answers(url: str) -> None:
    done = CliRunner().invoke(main, ["top", "--once", "--url", url])
    assert done.exit_code == 1 and "Error" in done.output
