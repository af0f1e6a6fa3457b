"""One request of the logs: where its time went, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.tracing.phases import HOPS, IN_ORDER, MISS_LABELS, PHASE_LABELS, QUEUE, Phase

RECEIVED = "request_received"
ENDS = ("request_finished", "request_cancelled", "request_failed")
STATES = {  # what a request without an end is doing, by its last line
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
GATEWAY, TOKENIZER, SCHEDULER, WORKER, DETOKENIZER = "gateway", "tokenizer", "scheduler", "worker", "detokenizer"
SERVICES = (GATEWAY, TOKENIZER, SCHEDULER, WORKER, "draft", DETOKENIZER)  # in the order of a request's way
PHASE_ORDER = tuple(phase.label for phase in IN_ORDER)
HOP_LABELS = frozenset(hop.label for hop in (Phase.FROM_CLIENT, *HOPS))
PLACES = {  # where a phase is spent, if not in the scheduler
    "tokenise": TOKENIZER,
    "detokenise": DETOKENIZER,
    **dict.fromkeys(("prefill", "decode", "draft_wait", "recompute"), WORKER),
    **dict.fromkeys(("gateway", "client_blocked", "untold", *HOP_LABELS), GATEWAY),
}
GROUPS = {  # phases that are drawn in one colour
    **{label: label for label in PHASE_LABELS},
    **dict.fromkeys(HOP_LABELS, "hops"),
    **dict.fromkeys((phase.label for phase in QUEUE), "queue"),
    **dict.fromkeys(("preempted", "recompute", "lost", "untold", "waking"), "interrupted"),
}
LAST_PHASES = ("to_gateway", "gateway", "client_blocked")  # of an output that reached its gateway
# The fields of the gateway's lines about a request; times without the `_ms` of the log.
FIELDS = frozenset(
    ("queue", "status", "cause", "reason", "field", "finish_reason", "request_id", "trace_id", "label", "tenant",
     "arrival", "prompt_tokens", "completion_tokens", "cached_tokens", "num_draft_tokens", "num_accepted_tokens",
     "num_ahead", "num_chunks", "num_preemptions", "ttft", "tpot", "itl_max", "e2e", "evicted_ago", *PHASE_LABELS,
     *MISS_LABELS)
)  # fmt: skip


class LogEntry(msgspec.Struct):
    """One log line.  `time` is Unix seconds by the clock of the process that wrote it."""

    event: str
    time: float
    service: str
    instance: str
    fields: dict[str, Any]  # all of the line


class Span(msgspec.Struct, frozen=True):
    """A phase of a request: milliseconds from the request's arrival."""

    phase: str
    start: float
    ms: float

    @property
    def end(self) -> float:
        return self.start + self.ms

    @property
    def service(self) -> str:
        """The service in which the phase is spent."""
        return PLACES.get(self.phase, SCHEDULER)


class RequestTrace(msgspec.Struct):
    """The log lines of one request, in the order of their events."""

    request_id: str
    entries: list[LogEntry]
    received: LogEntry | None = None
    last: LogEntry | None = None  # the gateway's last line about it

    def settle(self) -> None:
        """Order the lines, and find the first and last of the gateway.  Where several calls asked for the request, the
        last of them ends it."""
        self.entries.sort(key=lambda entry: entry.time)
        for entry in self.entries:
            if entry.service == GATEWAY and entry.event == RECEIVED:
                self.received = entry
            elif entry.service == GATEWAY and entry.event in ENDS:
                self.last = entry

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
            return float(arrival)
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
        return in_order(self.end.get("phases"))

    @property
    def spans(self) -> list[Span]:
        """The phases one after the other: first those until the first output, then the rest.  Within either part a
        phase that came several times is drawn as one."""
        phases = self.phases
        first = {name: min(ms, phases.get(name, 0.0)) for name, ms in in_order(self.end.get("first_phases")).items()}
        rest = {name: ms - first.get(name, 0.0) for name, ms in phases.items()}
        if GATEWAY in rest:  # the gateway's time after the first output is that of the last output
            rest |= {name: rest.pop(name) for name in LAST_PHASES if name in rest}
        spans, at = [], 0.0
        for name, ms in (*first.items(), *rest.items()):
            if ms > 0:
                spans.append(Span(name, at, ms))
                at += ms
        return spans

    @property
    def cause(self) -> str:
        """Why it took so long, in words; of an open request, what it is doing."""
        if self.last is None:
            entry = self.entries[-1]
            return f"{STATES.get(entry.event, entry.event)} ({entry.event} at {entry.instance})"
        if cause := self.end.get("cause"):
            return str(cause)
        if not self.phases:
            return str(self.end.get("reason") or self.status)
        name, ms = max(self.phases.items(), key=lambda item: item[1])
        return f"{ms:.0f} ms of {self.e2e_ms:.0f}: {name}"

    @property
    def values(self) -> dict[str, Any]:
        """The fields that conditions may use; times in milliseconds."""
        fields = (self.received.fields if self.received is not None else {}) | dict(self.end)
        plain = {name: value for name, value in fields.items() if not isinstance(value, dict)}
        times = {name.removesuffix("_ms"): value for name, value in plain.items()}
        queue = sum(ms for name, ms in self.phases.items() if GROUPS.get(name) == "queue")
        own = {"queue": queue, "status": self.status, "cause": self.cause, "request_id": self.request_id}
        return plain | times | (self.end.get("misses") or {}) | self.phases | own


def in_order(phases: Mapping[str, Any] | None) -> dict[str, float]:
    """Milliseconds by phase, in the order of a request's way; phases of later versions come last."""
    found = {str(name): float(ms) for name, ms in (phases or {}).items()}
    return {name: found[name] for name in (*(label for label in PHASE_ORDER if label in found), *found)}
