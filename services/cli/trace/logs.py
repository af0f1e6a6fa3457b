"""Log lines from files, directories, standard input or `docker compose logs`, put together into requests and steps."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from fileinput import hook_compressed
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from services.cli.trace.requests import FIELDS, LogEntry, RequestTrace

STANDARD_INPUT = "-"
STEP = "step_finished"
SLACK = 0.02  # seconds: a line is written a moment after its event
MOMENT = 1e-6  # seconds
ORDER = (  # the lines of every request; each comes after those before it
    "request_received", "request_tokenized", "request_queued", "sequence_scheduled", "sequence_admitted",
    "sequence_finished", "stream_finished", "request_finished",
)  # fmt: skip
_decoder = msgspec.json.Decoder(dict[str, Any])


class StepSpan(msgspec.Struct, frozen=True):
    """One step of a worker.  Two are in flight at a time: it is drawn from the end of the one before."""

    start: float  # Unix seconds
    end: float
    worker: str = ""
    step_id: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    sequences: list[list[Any]] = []  # (request id, index, tokens) of each


COUNTS = tuple(name for name in StepSpan.__struct_fields__ if name.startswith("num_"))


class Logs(msgspec.Struct):
    """The requests and steps of the logs."""

    traces: list[RequestTrace]  # by arrival
    step_lines: list[LogEntry]  # none unless `log_steps` was on

    @property
    def fields(self) -> frozenset[str]:
        """The names that conditions may use: those of every log, and those of these requests."""
        return FIELDS.union(*(trace.values for trace in self.traces))

    def find(self, name: str) -> list[RequestTrace]:
        """The requests with this id (or its beginning), trace id or label."""
        return [
            trace
            for trace in self.traces
            if trace.request_id.startswith(name) or name in (trace.trace_id, trace.label, trace.end.get("label"))
        ]

    def steps(self) -> list[StepSpan]:
        """Steps in the order in which they ended."""
        ended: dict[str, float] = {}
        spans = []
        for entry in sorted(self.step_lines, key=_end_of_step):
            worker, end = entry.fields.get("worker", ""), _end_of_step(entry)
            start = min(max(entry.time, ended.get(worker, entry.time)), end)
            ended[worker] = end
            spans.append(msgspec.convert(entry.fields | {"start": start, "end": end}, StepSpan, strict=False))
        return spans


def _end_of_step(entry: LogEntry) -> float:
    return entry.time + float(entry.fields.get("ms", 0.0)) / 1000


def read(sources: Iterable[str]) -> Iterator[LogEntry]:
    """Entries of all sources, one after the other; other lines are skipped.  Raises OSError."""
    for source in sources:
        for line in _lines_of(source):
            if (entry := parse(line)) is not None:
                yield entry


def _lines_of(source: str) -> Iterator[str]:
    """Lines of standard input, of a file (also gzipped), or of all files in a directory."""
    if source == STANDARD_INPUT:
        yield from sys.stdin
        return
    path = Path(source)
    for file in sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]:
        with hook_compressed(file, "r", encoding="utf-8", errors="replace") as text:
            yield from text


def parse(line: str) -> LogEntry | None:
    """The entry of a line, with or without the prefix of `docker compose logs`; None where the line has none."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        fields = _decoder.decode(line[start:])
        event, service, instance = fields["event"], fields["service"], fields["instance"]
        time = fields.get("at", datetime.fromisoformat(fields["timestamp"]).timestamp())
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    if not isinstance(time, float | int):
        return None
    return LogEntry(str(event), float(time), str(service), str(instance), fields)


def gather(entries: Iterable[LogEntry]) -> Logs:
    """Put lines together by request."""
    traces: dict[str, RequestTrace] = {}
    steps: list[LogEntry] = []
    for entry in entries:
        if entry.event == STEP:
            steps.append(entry)
        elif request_id := str(entry.fields.get("request_id", "")):
            traces.setdefault(request_id, RequestTrace(request_id, [])).entries.append(entry)
    for trace in traces.values():
        trace.settle()
    return Logs(sorted(traces.values(), key=lambda trace: trace.start), steps)


def align(logs: Logs) -> dict[str, float]:
    """Move the times of processes whose clocks differ from the gateway's; returns by how many seconds each was moved.

    A request's lines lie between the first and the last one of its gateway.  A process that writes its lines before or
    after that, at the median of its requests, is moved to the middle of the times that are possible.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)  # least and greatest offset, by request
    for trace in logs.traces:
        if trace.received is None or trace.last is None:
            continue
        for instance in {entry.instance for entry in trace.entries}:
            times = [entry.time for entry in trace.entries if entry.instance == instance]
            found[instance].append((trace.received.time - min(times), trace.last.time - max(times)))
    moved = {}
    for instance, bounds in found.items():
        low, high = (median(values) for values in zip(*bounds, strict=True))
        if low > SLACK or high < -SLACK:
            moved[instance] = (low + high) / 2
    for entry in [*logs.step_lines, *(entry for trace in logs.traces for entry in trace.entries)]:
        entry.time += moved.get(entry.instance, 0.0)
    for trace in logs.traces if moved else ():
        firsts = {entry.event: entry for entry in reversed(trace.entries)}
        for cause, effect in pairwise(firsts[event] for event in ORDER if event in firsts):
            effect.time = max(effect.time, cause.time + MOMENT)
        trace.entries.sort(key=lambda entry: entry.time)
    return moved
