"""Requests and steps in Chrome's trace-event format, which the Perfetto viewer opens.

Each process of the deployment is a process there.  A request is a slice at its gateway, with its phases as slices in
the processes where they were spent, and a flow through them: `s` at its first, `t` at each that follows, `f` at its
last.  Slices of one thread must not overlap, so requests that do are given threads of their own.  Times are
microseconds since the first thing that is told of.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import msgspec

from services.cli.trace.phases import GATEWAY, SERVICES, WORKER, is_hop
from services.cli.trace.requests import Logs, RequestTrace, Span
from services.cli.trace.steps import COUNTS, StepSpan, step_spans

STEPS = 1  # the thread of a worker's steps; those of requests follow
FIRST_LANE = 2
HIDDEN = ("event", "level", "timestamp", "service", "instance")
Event = dict[str, Any]


class Processes:
    """Numbers for the deployment's processes, and threads in which no two slices overlap."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._busy: dict[int, list[tuple[float, int]]] = {}  # when each thread is free again
        self._threads: set[tuple[int, int]] = set()

    def pid(self, service: str, instance: str) -> int:
        name = instance or service
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            place = SERVICES.index(service) if service in SERVICES else len(SERVICES)
            self._say(pid, 0, "process_name", name=name)
            self._say(pid, 0, "process_sort_index", sort_index=place)
        return self._pids[name]

    def lane(self, pid: int, start: float, end: float) -> int:
        """A thread that is free from `start` to `end`; asked in the order of starts."""
        busy = self._busy.setdefault(pid, [])
        if busy and busy[0][0] <= start:
            _, tid = heapq.heappop(busy)
        else:
            tid = FIRST_LANE + len(busy)
        heapq.heappush(busy, (end, tid))
        self.thread(pid, tid, f"requests {tid - FIRST_LANE + 1}")
        return tid

    def thread(self, pid: int, tid: int, name: str) -> None:
        if (pid, tid) not in self._threads:
            self._threads.add((pid, tid))
            self._say(pid, tid, "thread_name", name=name)
            self._say(pid, tid, "thread_sort_index", sort_index=tid)

    def _say(self, pid: int, tid: int, what: str, **args: Any) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args})


class ServiceVisit(msgspec.Struct):
    """A stretch of a request's way within one process, and the phases that it spent there."""

    service: str
    instance: str
    start: float  # microseconds, as all times here
    end: float
    spans: list[Span]
    pid: int = 0
    tid: int = 0


def trace_events(logs: Logs) -> dict[str, Any]:
    """The whole file, to be written as JSON."""
    steps = step_spans(logs.steps)
    over = [trace for trace in logs.traces if trace.is_over and trace.spans]
    origin = min([trace.start for trace in over] + [step.start for step in steps], default=0.0)
    ways = [(trace, visits_of(trace, us(trace.start, origin))) for trace in over]
    processes = Processes()
    for visit in sorted((visit for _, visits in ways for visit in visits), key=lambda visit: visit.start):
        visit.pid = processes.pid(visit.service, visit.instance)
        visit.tid = processes.lane(visit.pid, visit.start, visit.end)
    events: list[Event] = []
    for number, (trace, visits) in enumerate(ways, 1):
        events += events_of(trace, visits, number)
    for step in steps:
        events += events_of_step(step, processes, origin)
    return {"traceEvents": processes.events + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


def visits_of(trace: RequestTrace, base: float) -> list[ServiceVisit]:
    """The gateway's, which is the whole request, and those of the others in order.  It began at `base`."""
    spans = trace.spans
    here = [span for span in spans if span.service == GATEWAY and not is_hop(span.phase)]
    assert trace.last is not None
    visits = [ServiceVisit(GATEWAY, trace.last.instance, base, base + 1000 * max(trace.e2e_ms, spans[-1].end), here)]
    away: ServiceVisit | None = None
    for span in spans:
        if span.service == GATEWAY or is_hop(span.phase):
            away = None
            continue
        start, end = base + 1000 * span.start, base + 1000 * span.end
        if away is None or away.service != span.service:
            away = ServiceVisit(span.service, instance_of(trace, span.service), start, end, [])
            visits.append(away)
        away.spans.append(span)
        away.end = end
    return visits


def instance_of(trace: RequestTrace, service: str) -> str:
    """Which process of a service had a request, as far as its lines tell."""
    for entry in reversed(trace.entries):
        if entry.service == service:
            return entry.instance
        if service == WORKER and entry.fields.get("worker"):
            return str(entry.fields["worker"])
    return service


def events_of(trace: RequestTrace, visits: list[ServiceVisit], number: int) -> list[Event]:
    """Slices of one request and of its phases, and the flow through them."""
    events, base = [], visits[0].start
    for place, visit in enumerate(visits):
        name = f"request {trace.request_id[:8]}"
        args = told(trace) if place == 0 else {"request_id": trace.request_id}
        events.append(slice_of(visit, name, "request", visit.start, visit.end, args))
        for span in visit.spans:
            start, end = base + 1000 * span.start, base + 1000 * span.end
            events.append(slice_of(visit, span.phase, "phase", start, end, {"ms": span.ms}))
    points = [("s" if place == 0 else "t", visit, visit.start) for place, visit in enumerate(visits)]
    points.append(("f", visits[0], (visits[-1].end + visits[0].end) / 2))  # back at the gateway
    for kind, visit, at in points:
        event = {"ph": kind, "id": number, "name": "request", "cat": "request", "ts": round(at, 3)}
        events.append(event | {"pid": visit.pid, "tid": visit.tid} | ({"bp": "e"} if kind == "f" else {}))
    return events


def events_of_step(step: StepSpan, processes: Processes, origin: float) -> list[Event]:
    """A step's slice with what was in it, and how full the worker was."""
    pid = processes.pid(WORKER, step.worker)
    processes.thread(pid, STEPS, "steps")
    counts = {name: getattr(step, name) for name in COUNTS}
    slice_ = {
        "ph": "X",
        "name": step.name,
        "cat": "step",
        "pid": pid,
        "tid": STEPS,
        "ts": us(step.start, origin),
        "dur": us(step.end, step.start),
        "args": counts | {"sequences": {f"{row[0][:8]}.{row[1]}": row[2] for row in step.sequences}},
    }
    at = {"ph": "C", "pid": pid, "tid": 0, "ts": us(step.start, origin)}
    blocks = {"used": step.num_used_blocks, "free": step.num_blocks - step.num_used_blocks}
    sequences = {"running": step.num_running, "waiting": step.num_waiting}
    return [slice_, at | {"name": "KV blocks", "args": blocks}, at | {"name": "sequences", "args": sequences}]


def slice_of(visit: ServiceVisit, name: str, category: str, start: float, end: float, args: Mapping[str, Any]) -> Event:
    """`ts` and `ts` + `dur` are rounded alike, so that what touches does not overlap."""
    at = round(start, 3)
    return {
        "ph": "X", "name": name, "cat": category, "pid": visit.pid, "tid": visit.tid, "ts": at,
        "dur": round(max(0.0, round(end, 3) - at), 3), "args": args,
    }  # fmt: skip


def told(trace: RequestTrace) -> dict[str, Any]:
    """What the viewer shows of a request that is chosen."""
    known = {name: value for name, value in trace.end.items() if name not in HIDDEN}
    return known | {"label": trace.label, "cause": trace.cause}


def us(at: float, origin: float) -> float:
    """Microseconds, to the nanosecond."""
    return max(0.0, round((at - origin) * 1e6, 3))
