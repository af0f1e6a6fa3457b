"""Requests put together from log lines: what happened to each, where, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from services.cli.trace.phases import place_of, rank
from services.cli.trace.reading import LogEntry
from shared.phases import MISS_LABELS, PHASE_LABELS

RECEIVED = "request_received"
ENDS = ("request_finished", "request_cancelled", "request_failed")
GATEWAY = "gateway"
STEP = "step_finished"
STATES = {  # what a request without an end is doing, by the last line that told of it
    RECEIVED: "on its way to a tokenizer",
    "request_tokenized": "on its way to the scheduler",
    "request_queued": "waiting in the queue",
    "sequence_placed": "waiting in the queue",
    "sequence_scheduled": "being computed",
    "sequence_admitted": "being computed",
    "sequence_preempted": "preempted, and waiting to be computed again",
    "sequence_finished": "on its way back to the client",
    "stream_finished": "on its way back to the client",
}


class Span(msgspec.Struct, frozen=True):
    """A phase of a request as a stretch of time: milliseconds from the request's arrival."""

    phase: str
    start: float
    ms: float

    @property
    def end(self) -> float:
        return self.start + self.ms

    @property
    def service(self) -> str:
        return place_of(self.phase)


class RequestTrace(msgspec.Struct):
    """One request, as far as the logs tell of it.  Entries are in the order in which things happened."""

    request_id: str
    entries: list[LogEntry]
    received: LogEntry | None = None
    last: LogEntry | None = None  # the gateway's last word
    offset: float = 0.0  # seconds by which the gateway's clock was moved

    @property
    def end(self) -> Mapping[str, Any]:
        """The fields of the gateway's last line; empty while there is none."""
        return self.last.fields if self.last is not None else {}

    @property
    def is_over(self) -> bool:
        return self.last is not None

    @property
    def start(self) -> float:
        """Unix seconds, by the clock of the gateway."""
        arrival = self.end.get("arrival")
        if isinstance(arrival, float | int):
            return float(arrival) + self.offset
        if self.last is not None and self.e2e_ms:
            return self.last.time - self.e2e_ms / 1000
        return self.entries[0].time

    @property
    def e2e_ms(self) -> float:
        return float(self.end.get("e2e_ms") or 0.0)

    @property
    def status(self) -> str:
        return str(self.end.get("status", "open"))

    @property
    def label(self) -> str:
        return str(self.received.fields.get("label", "")) if self.received is not None else ""

    @property
    def trace_id(self) -> str:
        return str(self.entries[0].fields.get("trace_id", ""))

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds by phase, in the order of a request's way."""
        found = {str(name): float(ms) for name, ms in (self.end.get("phases") or {}).items()}
        return dict(sorted(found.items(), key=lambda item: rank(item[0])))

    @property
    def spans(self) -> list[Span]:
        """The phases one after the other: first those until the first output, then the rest.  Within either part a
        phase that came several times is drawn as one."""
        phases = self.phases
        first = {str(name): float(ms) for name, ms in (self.end.get("first_phases") or {}).items()}
        first = {name: min(first[name], phases.get(name, 0.0)) for name in sorted(first, key=rank)}
        rest = {name: ms - first.get(name, 0.0) for name, ms in phases.items()}
        if "gateway" in rest:  # then it is what becomes of the last output there
            back = ("to_gateway", "gateway", "client_blocked")
            rest = {name: rest[name] for name in (*(n for n in rest if n not in back), *back) if name in rest}
        return laid_out((first, rest))

    @property
    def cause(self) -> str:
        """Why it took so long, in words; of an open request, what it is doing."""
        if self.last is None:
            return self.state
        if cause := self.end.get("cause"):
            return str(cause)
        phases = self.phases
        if not phases:
            return str(self.end.get("reason") or self.status)
        name = max(phases, key=lambda phase: phases[phase])
        return f"{phases[name]:.0f} ms of {self.e2e_ms:.0f}: {name}"

    @property
    def state(self) -> str:
        entry = self.entries[-1]
        return f"{STATES.get(entry.event, entry.event)} ({entry.event} at {entry.instance})"

    @property
    def values(self) -> dict[str, Any]:
        """Everything that can be asked after by name; times in milliseconds."""
        received = self.received.fields if self.received is not None else {}
        named = {name.removesuffix("_ms"): value for name, value in self.end.items() if name.endswith("_ms")}
        fields = {name: value for name, value in (received | dict(self.end)).items() if not isinstance(value, dict)}
        queue = sum(ms for name, ms in self.phases.items() if name.startswith("queue_"))
        own = {"queue": queue, "status": self.status, "cause": self.cause, "request_id": self.request_id}
        return fields | named | (self.end.get("misses") or {}) | self.phases | own


def laid_out(parts: Iterable[Mapping[str, float]]) -> list[Span]:
    """Phases as spans, each behind the one before; `parts` come in order, and so do the phases of each."""
    spans, at = [], 0.0
    for part in parts:
        for name in part:
            if part[name] > 0:
                spans.append(Span(name, at, part[name]))
                at += part[name]
    return spans


# What the gateway's lines about a request may have, but for times: those are in the docs as `..._ms`.
FIELDS = frozenset(
    ("queue", "status", "cause", "reason", "field", "finish_reason", "request_id", "trace_id", "label", "tenant",
     "arrival", "prompt_tokens", "completion_tokens", "cached_tokens", "num_draft_tokens", "num_accepted_tokens",
     "num_ahead", "num_chunks", "num_preemptions", "ttft", "tpot", "itl_max", "e2e", "evicted_ago", *PHASE_LABELS,
     *MISS_LABELS)
)  # fmt: skip


class Logs(msgspec.Struct):
    """What matters of the logs."""

    traces: list[RequestTrace]  # by arrival
    steps: list[LogEntry]  # by time; none unless `log_steps` was on

    @property
    def fields(self) -> frozenset[str]:
        """The names that can be asked after: those of every log, and what these requests have besides."""
        return FIELDS.union(*(trace.values for trace in self.traces))

    def find(self, name: str) -> list[RequestTrace]:
        """The requests of an id (or its beginning), a trace id or a label."""
        return [
            trace
            for trace in self.traces
            if trace.request_id.startswith(name) or name in (trace.trace_id, trace.label, trace.end.get("label"))
        ]


def gather(entries: Iterable[LogEntry]) -> Logs:
    """Put lines together.  A request that several calls asked for ends with the last of them."""
    traces: dict[str, RequestTrace] = {}
    steps: list[LogEntry] = []
    for entry in entries:
        if entry.event == STEP:
            steps.append(entry)
        elif request_id := entry.request_id:
            trace = traces.get(request_id)
            if trace is None:
                trace = traces[request_id] = RequestTrace(request_id, [])
            trace.entries.append(entry)
    for trace in traces.values():
        settle(trace)
    return Logs(sorted(traces.values(), key=lambda t: t.start), sorted(steps, key=lambda entry: entry.time))


def settle(trace: RequestTrace) -> None:
    """Order a request's lines, and find its first and last."""
    trace.entries.sort(key=lambda entry: entry.time)
    for entry in trace.entries:
        if entry.service == GATEWAY and entry.event == RECEIVED:
            trace.received = entry
        elif entry.service == GATEWAY and entry.event in ENDS:
            trace.last = entry
