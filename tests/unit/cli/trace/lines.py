"""Log lines of made-up requests, as docs/tracing.md defines them; clocks of the services may be set apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

START = 1_795_261_499.0
PHASES = {
    "gateway": 0.4, "to_tokenizer": 0.2, "tokenise": 1.2, "to_scheduler": 0.2, "queue_step": 2.0, "queue_blocks": 610.0,
    "prefill": 28.0, "decode": 190.0, "preempted": 5.0, "to_detokenizer": 0.5, "detokenise": 0.5, "to_gateway": 0.5,
    "client_blocked": 1.5,
}  # fmt: skip
AFTER = ("decode", "preempted", "client_blocked")  # of these phases nothing comes before the first output
INSTANCES = {name: f"{name}-1a2b" for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")}


def line(when: float, service: str, event: str, clocks: Mapping[str, float] | None = None, **fields: Any) -> str:
    """One line; `clocks`: by how many seconds a service's clock is ahead."""
    shown = datetime.fromtimestamp(when + (clocks or {}).get(service, 0.0), UTC).isoformat().replace("+00:00", "Z")
    known = {"event": event, "timestamp": shown, "service": service, "instance": INSTANCES[service], "level": "info"}
    return json.dumps(known | fields)


def request(
    request_id: str,
    *,
    start: float = START,
    clocks: Mapping[str, float] | None = None,
    phases: Mapping[str, float] = PHASES,
    ended: bool = True,
    label: str = "",
    **fields: Any,
) -> Iterator[str]:
    """All lines of one request, in the order of its way."""
    ids = {"request_id": request_id, "trace_id": request_id[::-1]}

    def say(ms: float, service: str, event: str, **more: Any) -> str:
        return line(start + ms / 1000, service, event, clocks, **ids, **more)

    e2e = sum(phases.values())
    admitted = sum(ms for name, ms in phases.items() if name.startswith(("queue", "to_", "tokenise")))
    yield say(0.3, "gateway", "request_received", label=label, tenant="", n=1, max_tokens=64)
    yield say(2.0, "tokenizer", "request_tokenized", num_prompt_tokens=812, duration=0.001)
    yield say(2.2, "scheduler", "request_queued", num_prompt_tokens=812, num_ahead=14)
    yield say(admitted, "scheduler", "sequence_scheduled", worker=INSTANCES["worker"], index=0, num_cached_tokens=512)
    yield say(admitted + 0.3, "worker", "sequence_admitted", index=0, row=3, step_id=7)
    if not ended:
        return
    yield say(e2e - 3.0, "scheduler", "sequence_finished", index=0, num_output_tokens=64)
    yield say(e2e - 2.0, "detokenizer", "stream_finished", index=0, num_output_tokens=64)
    first = {name: ms for name, ms in phases.items() if name not in AFTER}
    told = {
        "status": "OK", "prompt_tokens": 812, "completion_tokens": 64, "cached_tokens": 512,
        "ttft_ms": sum(first.values()),
        "tpot_ms": 3.1, "e2e_ms": e2e, "arrival": start + (clocks or {}).get("gateway", 0.0), "phases": dict(phases),
        "first_phases": first, "misses": {"evicted": 288, "below_block": 12}, "evicted_ago_ms": 5120.0, "num_ahead": 14,
        "cause": "612 ms of 840 queued: no free blocks, 14 requests ahead",
    }  # fmt: skip
    yield say(e2e, "gateway", "request_finished", **(told | fields))


def step(number: int, at: float, ms: float, sequences: list[tuple[str, int, int]], **fields: Any) -> str:
    """A line of a step that was planned at `at` and answered `ms` later."""
    num_tokens = sum(count for _, _, count in sequences)
    values: dict[str, Any] = {
        "at": at, "ms": ms, "worker": INSTANCES["worker"], "step_id": number, "num_tokens": num_tokens,
        "num_prefill_tokens": 0, "num_draft_tokens": 0, "num_running": len(sequences), "num_waiting": 2,
        "num_used_blocks": 30, "num_blocks": 64, "sequences": [list(sequence) for sequence in sequences],
    }  # fmt: skip
    return line(at + ms / 1000, "scheduler", "step_finished", **(values | fields))


def many(count: int) -> list[str]:
    """Requests that overlap, and the steps that computed them."""
    lines: list[str] = []
    for number in range(count):
        phases = {**PHASES, "queue_blocks": 10.0 * (number % 7), "decode": 100.0 + number}
        lines += request(f"{number:032x}", start=START + 0.02 * number, phases=phases, label=f"r{number}")
    for number in range(2 * count):
        lines.append(step(number, START + 0.01 * number, 18.0, [(f"{number // 2:032x}", 0, 1), ("f" * 32, 0, 5)]))
    return lines
