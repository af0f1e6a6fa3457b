"""One HTML file about requests and steps, with neither a script nor anything outside it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from services.cli.trace.logs import Logs, StepSpan
from services.cli.trace.requests import GROUPS, PHASE_ORDER, RequestTrace
from services.cli.trace.waterfall import ms
from shared.metrics import percentile

TEMPLATE = Path(__file__).with_name("report.html")
MAX_REQUESTS = 500  # that are drawn: the slowest
MAX_STEPS = 20_000
KINDS = (("decode", "output tokens"), ("draft_wait", "draft tokens"), ("prefill", "prompt tokens"))  # colour, of a step
HEIGHT, KV_HEIGHT = 110, 60  # of a worker's timeline: tokens, and below them KV blocks


def page(logs: Logs) -> str:
    """The file's text."""
    over, steps = [trace for trace in logs.traces if trace.is_over], logs.steps()
    slowest = sorted(over, key=lambda trace: -trace.e2e_ms)[:MAX_REQUESTS]
    begin = min((trace.start for trace in over), default=0.0)
    end = max((trace.start + trace.e2e_ms / 1000 for trace in over), default=0.0)
    parts = {
        "about": f"{len(over)} requests that ended, {len(logs.traces) - len(over)} that did not · "
        f"{ms(1000 * (end - begin))} from {clock(begin)} · written {clock(time.time())}",
        "tiles": "".join(tiles(over)),
        "legend": legend((group, group) for group in dict.fromkeys(GROUPS[label] for label in PHASE_ORDER)),
        "totals": "".join(totals(over)),
        "which": f"The {len(slowest)} slowest, by arrival.",
        "rows": "".join(rows(sorted(slowest, key=lambda trace: trace.start))) or "No request has ended.",
        "steps": "".join(timelines(steps)) or "No steps in these logs: the scheduler writes them with log_steps=true.",
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<span><i style="background:var(--{colour})"></i>{text}</span> ' for colour, text in entries)


def tiles(traces: list[RequestTrace]) -> Iterator[str]:
    """Quantiles of the times that users notice."""
    for name, key in (("TTFT", "ttft_ms"), ("E2E", "e2e_ms")):
        if values := [float(trace.end[key]) for trace in traces if trace.end.get(key) is not None]:
            for which, q in (("median", 50), ("90th", 90), ("99th", 99)):
                yield f'<div class="tile"><b>{ms(percentile(values, q))}</b><span>{name}, {which}</span></div>'


def totals(traces: list[RequestTrace]) -> Iterator[str]:
    """A bar for each phase: the time of all requests."""
    spent = Counter[str]()
    for trace in traces:
        spent.update(trace.phases)
    for phase, total in spent.most_common():
        words = f"{ms(total)} · {100 * total / spent.total():.1f} %"
        yield f"<tr><td>{escape(phase)}<td>{words}<td class=bar>{bar(phase, 0, total / max(spent.values()), words)}"


def rows(traces: list[RequestTrace]) -> Iterator[str]:
    """Each request in its place in time; opened, its phases and figures."""
    first = min((trace.start for trace in traces), default=0.0)
    whole = max((1000 * (trace.start - first) + trace.e2e_ms for trace in traces), default=0.0) or 1.0
    for trace in traces:
        start, end = 1000 * (trace.start - first), trace.end
        bars = "".join(
            bar(span.phase, (start + span.start) / whole, span.ms / whole, f"{span.phase}: {ms(span.ms)}")
            for span in trace.spans
        )
        tokens = " + ".join(str(end.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))
        figures = [trace.request_id, trace.status, f"{tokens} tokens, {end.get('cached_tokens', 0)} cached"]
        figures += [f"TTFT {ms(end['ttft_ms'])}"] if end.get("ttft_ms") is not None else []
        figures += [f"whole {ms(trace.e2e_ms)}", *(f"{n} {name}" for name, n in (end.get("misses") or {}).items())]
        phases = "".join(
            f"<tr><td>{escape(span.phase)}<td>{ms(span.start)}<td>{ms(span.ms)}<td class=bar>"
            + bar(span.phase, span.start / (trace.e2e_ms or 1), span.ms / (trace.e2e_ms or 1), "")
            for span in trace.spans
        )
        yield (
            f'<details class="row"><summary><span class="name">{escape((trace.label or trace.request_id)[:16])}</span>'
            f'<span class="line">{bars}</span></summary><p class="cause">{escape(trace.cause)}</p>'
            f"<p>{escape(' · '.join(figures))}</p><table><tr><th>phase<th>from<th>time<th>{phases}</table></details>\n"
        )


def bar(phase: str, start: float, length: float, tip: str) -> str:
    """A piece of a line; `start` and `length` are shares of it."""
    place = f"left:{100 * start:.3f}%;width:{100 * length:.3f}%;background:var(--{GROUPS.get(phase, 'hops')})"
    return f'<i class="bar" style="{place}" title="{escape(tip)}"></i>'


def timelines(steps: list[StepSpan]) -> Iterator[str]:
    """The steps of each worker: tokens over time, and below them the share of KV blocks in use."""
    drawn = steps[:MAX_STEPS]
    for worker in dict.fromkeys(step.worker for step in drawn):
        own = [step for step in drawn if step.worker == worker]
        first, whole = own[0].start, max(step.end for step in own) - own[0].start or 1.0
        most = max(step.num_tokens for step in own) or 1
        shapes = "".join(shape for step in own for shape in step_shapes(step, first, whole, most))
        yield (
            f"<h2>{escape(worker)}</h2><p class=note>{len(own)} of {len(steps)} steps over {ms(1000 * whole)}; at most "
            f"{most} tokens.  {legend([*KINDS, ('queue', 'KV blocks in use')])}</p>"
            f'<svg class="timeline" viewBox="0 0 1000 {HEIGHT + KV_HEIGHT}" preserveAspectRatio="none">{shapes}</svg>'
        )


def step_shapes(step: StepSpan, first: float, whole: float, most: int) -> Iterator[str]:
    """One step: its tokens by kind, one above the other, and its KV blocks; a tip says the figures."""
    output = step.num_tokens - step.num_prefill_tokens - step.num_draft_tokens
    x, width = 1000 * (step.start - first) / whole, max(0.3, 1000 * (step.end - step.start) / whole)
    used = KV_HEIGHT * step.num_used_blocks / (step.num_blocks or 1)
    yield (
        f"<g><title>step {step.step_id}: {ms(1000 * (step.end - step.start))}, {len(step.sequences)} sequences, "
        f"{step.num_tokens} tokens ({step.num_prefill_tokens} of prompts, {step.num_draft_tokens} drafted), KV blocks "
        f"{step.num_used_blocks} of {step.num_blocks}, {step.num_running} running, {step.num_waiting} waiting</title>"
    )
    y = float(HEIGHT)
    for (colour, _), count in zip(KINDS, (output, step.num_draft_tokens, step.num_prefill_tokens), strict=True):
        if count > 0:
            height = HEIGHT * count / most
            y -= height
            yield f'<path d="M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}Z" fill="var(--{colour})"/>'
    top = HEIGHT + KV_HEIGHT - used
    yield f'<path d="M{x:.2f} {top:.2f}h{width:.2f}v{used:.2f}h-{width:.2f}Z" fill="var(--queue)"/></g>'
