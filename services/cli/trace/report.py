"""One HTML file about requests and steps, with nothing outside it: `report.html` with the figures put in."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from services.cli.trace.logs import Logs
from services.cli.trace.requests import GROUPS, PHASE_ORDER, RequestTrace
from shared.metrics import percentile

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*FIGURES*/null"
MAX_REQUESTS = 500  # in the waterfall: the slowest
MAX_STEPS = 20_000


def page(logs: Logs) -> str:
    """The file's text."""
    # No figure can end the script that it stands in: "<" is written in JavaScript's other way.
    data = msgspec.json.encode(figures(logs)).decode().replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def figures(logs: Logs) -> dict[str, Any]:
    """What the page draws; times in milliseconds since `origin`, Unix seconds."""
    over = [trace for trace in logs.traces if trace.is_over]
    steps = logs.steps()
    origin = min([trace.start for trace in over] + [step.start for step in steps], default=0.0)
    slowest = sorted(over, key=lambda trace: -trace.e2e_ms)[:MAX_REQUESTS]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "origin": origin,
        "num_requests": len(over),
        "num_open": len(logs.traces) - len(over),
        "figures": {name: quantiles(over, key) for name, key in (("TTFT", "ttft_ms"), ("E2E", "e2e_ms"))},
        "groups": list(dict.fromkeys(GROUPS[label] for label in PHASE_ORDER)),
        "group_of": GROUPS,
        "totals": totals(over),
        "requests": [of_request(trace, origin) for trace in sorted(slowest, key=lambda trace: trace.start)],
        "num_steps": len(steps),
        "steps": [
            [
                step.worker, step.step_id, ms(step.start, origin), ms(step.end, origin), len(step.sequences),
                step.num_tokens, step.num_prefill_tokens, step.num_draft_tokens, step.num_used_blocks, step.num_blocks,
                step.num_running, step.num_waiting,
            ]
            for step in steps[:MAX_STEPS]
        ],
    }  # fmt: skip


def quantiles(traces: list[RequestTrace], key: str) -> list[float]:
    """Median, 90th and 99th percentile of a time."""
    values = [float(trace.end[key]) for trace in traces if trace.end.get(key) is not None]
    return [round(percentile(values, q), 1) for q in (50, 90, 99)] if values else []


def totals(traces: list[RequestTrace]) -> dict[str, float]:
    """Milliseconds by phase, of all requests."""
    found: Counter[str] = Counter()
    for trace in traces:
        found.update(trace.phases)
    return {name: round(ms, 3) for name, ms in found.items()}


def of_request(trace: RequestTrace, origin: float) -> dict[str, Any]:
    end = trace.end
    return {
        "id": trace.request_id,
        "label": trace.label,
        "status": trace.status,
        "start": ms(trace.start, origin),
        "e2e": trace.e2e_ms,
        "ttft": end.get("ttft_ms"),
        "tpot": end.get("tpot_ms"),
        "tokens": [end.get("prompt_tokens", 0), end.get("cached_tokens", 0), end.get("completion_tokens", 0)],
        "cause": trace.cause,
        "misses": end.get("misses") or {},
        "spans": [[span.phase, round(span.start, 3), round(span.ms, 3)] for span in trace.spans],
    }


def ms(at: float, origin: float) -> float:
    return round((at - origin) * 1000, 3)
