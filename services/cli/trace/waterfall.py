"""One request in the terminal: its phases as bars, why it took so long, and its log lines."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator

import click

from services.cli.display.tables import aligned
from services.cli.trace.requests import GROUPS, RequestTrace, Span

COLOURS = {
    "gateway": "white", "hops": "bright_black", "tokenise": "cyan", "queue": "yellow", "prefill": "blue",
    "decode": "green", "draft_wait": "magenta", "interrupted": "red", "detokenise": "cyan",
    "client_blocked": "bright_red",
}  # fmt: skip
EIGHTHS = " ▏▎▍▌▋▊▉█"
MAX_WIDTH = 100
NAME_WIDTH = 15
LINE_FIELDS = ("cause", "reason", "worker", "num_ahead", "num_prompt_tokens", "num_output_tokens", "row", "step_id",
               "index")  # fmt: skip
SHOWN_FIELDS = ("num_ahead", "num_chunks", "num_preemptions", "num_draft_tokens", "num_accepted_tokens")


def waterfall(trace: RequestTrace) -> str:
    """Everything about one request, in lines."""
    return "\n".join([*head(trace), "", *bars(trace), *foot(trace), *events(trace)])


def head(trace: RequestTrace) -> Iterator[str]:
    end = trace.end
    label = f"  label {trace.label!r}" if trace.label else ""
    yield click.style(f"request {trace.request_id}", bold=True) + f"{label}  {trace.status}"
    if trace.is_over:
        tokens = f"{end.get('prompt_tokens', '?')} + {end.get('completion_tokens', '?')} tokens"
        figures = (("ttft", "ttft_ms"), ("tpot", "tpot_ms"), ("longest gap", "itl_max_ms"), ("whole", "e2e_ms"))
        yield f"{tokens}  " + "  ".join(f"{name} {ms(end[key])}" for name, key in figures if end.get(key) is not None)
    yield click.style(trace.cause, fg="yellow", bold=True)


def bars(trace: RequestTrace) -> Iterator[str]:
    spans = trace.spans
    whole = max((span.end for span in spans), default=0.0)
    width = max(20, min(MAX_WIDTH, shutil.get_terminal_size().columns - NAME_WIDTH - 14))
    for span in spans:
        yield f"{span.phase:<{NAME_WIDTH}}{styled_bar(span, whole, width)} {ms(span.ms):>10}"


def styled_bar(span: Span, whole: float, width: int) -> str:
    """A bar in its place on a line of `width` characters, to an eighth of a character where it ends."""
    scale = width / whole if whole else 0.0
    start = min(width - 1, int(span.start * scale))
    length = max(0.125, min(width - start, span.end * scale - start))
    full, part = int(length), int(8 * (length - int(length)))
    bar = EIGHTHS[8] * full + (EIGHTHS[part] if part else "")
    return " " * start + click.style(bar, fg=COLOURS.get(GROUPS.get(span.phase, ""))) + " " * (width - start - len(bar))


def foot(trace: RequestTrace) -> Iterator[str]:
    end = trace.end
    if misses := end.get("misses"):
        ago = f" (given away {ms(end['evicted_ago_ms'])} before)" if end.get("evicted_ago_ms") is not None else ""
        reasons = ", ".join(f"{count} {name}{ago if name == 'evicted' else ''}" for name, count in misses.items())
        yield f"prefix cache: {end.get('cached_tokens', 0)} tokens were there; missed {reasons}"
    if known := [f"{name} {end[name]}" for name in SHOWN_FIELDS if end.get(name)]:
        yield "  ".join(known)


def events(trace: RequestTrace) -> Iterator[str]:
    """The lines themselves, by the time since the request's arrival."""
    yield ""
    for entry in trace.entries:
        since = f"{1000 * (entry.time - trace.start):>10.1f} ms"
        fields = " ".join(
            f"{name}={entry.fields[name]}" for name in LINE_FIELDS if entry.fields.get(name) not in (None, "")
        )
        yield click.style(f"{since}  {entry.instance:<22} {entry.event} {fields}", fg="bright_black")


def table(traces: Iterable[RequestTrace]) -> str:
    """One line for each request."""
    rows = []
    for trace in traces:
        times = (trace.end.get(key) for key in ("e2e_ms", "ttft_ms", "tpot_ms"))
        tokens = (str(trace.end.get(key, "")) for key in ("prompt_tokens", "completion_tokens"))
        shown = ("" if value is None else ms(value) for value in times)
        rows.append([trace.request_id[:12], trace.label[:16], trace.status, *shown, *tokens, trace.cause])
    names = ["request", "label", "status", "e2e", "ttft", "tpot", "prompt", "output", "cause"]
    return aligned(names, rows, left=(0, 1, 2, 8))


def ms(value: float) -> str:
    """Milliseconds, as short as they can be read."""
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
