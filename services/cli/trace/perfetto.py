"""Requests and steps in Chrome's trace-event format, which the Perfetto viewer opens.

Each process of the deployment is a process there.  A request is a slice at its gateway, with its phases as slices in
the processes where they were spent, and a flow through them: `s` at its first, `t` at each that follows, `f` at its
last.  Slices of one thread must not overlap, so requests that do are given threads of their own.  Times are
microseconds since the first event.
"""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from services.cli.trace.logs import COUNTS, Logs, StepSpan
from services.cli.trace.requests import GATEWAY, HOP_LABELS, SERVICES, WORKER, RequestTrace, Span

STEPS = 1  # the thread of a worker's steps; those of requests follow
FIRST_LANE = 2
HIDDEN = ("event", "level", "timestamp", "service", "instance")
Event = dict[str, Any]


class Processes:
    """Numbers for the deployment's processes, and threads in which no two slices overlap."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._lanes: dict[int, list[tuple[float, int]]] = {}  # by process: when each thread is free again

    def pid(self, service: str, instance: str) -> int:
        name = instance or service
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            place = SERVICES.index(service) if service in SERVICES else len(SERVICES)
            self._describe("process", pid, 0, name, place)
            if service == WORKER:
                self._describe("thread", pid, STEPS, "steps", STEPS)
        return self._pids[name]

    def lane(self, pid: int, start: float, end: float) -> int:
        """A thread that is free from `start` to `end`; to be called in the order of starts."""
        lanes = self._lanes.setdefault(pid, [])
        if lanes and lanes[0][0] <= start:
            tid = heapq.heappop(lanes)[1]
        else:
            tid = FIRST_LANE + len(lanes)
            self._describe("thread", pid, tid, f"requests {len(lanes) + 1}", tid)
        heapq.heappush(lanes, (end, tid))
        return tid

    def _describe(self, kind: str, pid: int, tid: int, name: str, place: int) -> None:
        for what, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": place})):
            self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args})


class ServiceVisit(msgspec.Struct):
    """A part of a request's way within one process, and the phases that it spent there."""

    service: str
    instance: str
    start: float  # microseconds, as all times here
    end: float
    spans: list[Span]
    pid: int = 0
    tid: int = 0

    def slice(self, name: str, category: str, start: float, end: float, args: Event) -> Event:
        """`ts` and `ts` + `dur` are rounded alike, so that neighbours do not overlap."""
        at = round(start, 3)
        duration = round(max(0.0, round(end, 3) - at), 3)
        place = {"pid": self.pid, "tid": self.tid}
        return {"ph": "X", "name": name, "cat": category, **place, "ts": at, "dur": duration, "args": args}


def trace_events(logs: Logs) -> dict[str, Any]:
    """The whole file, to be written as JSON."""
    steps, over = logs.steps(), [trace for trace in logs.traces if trace.is_over and trace.spans]
    origin = min([trace.start for trace in over] + [step.start for step in steps], default=0.0)
    ways = [(trace, visits_of(trace, microseconds(trace.start, origin))) for trace in over]
    processes, events = Processes(), []
    for visit in sorted((visit for _, visits in ways for visit in visits), key=lambda visit: visit.start):
        visit.pid = processes.pid(visit.service, visit.instance)
        visit.tid = processes.lane(visit.pid, visit.start, visit.end)
    for number, (trace, visits) in enumerate(ways, 1):
        events += events_of(trace, visits, number)
    for step in steps:
        events += events_of_step(step, processes.pid(WORKER, step.worker), origin)
    return {"traceEvents": processes.events + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


def visits_of(trace: RequestTrace, base: float) -> list[ServiceVisit]:
    """The gateway's, which is the whole request, and those of the others in order.  The request began at `base`."""
    assert trace.last is not None
    end = base + 1000 * max(trace.e2e_ms, trace.spans[-1].end)
    visits = [ServiceVisit(GATEWAY, trace.last.instance, base, end, [])]
    away: ServiceVisit | None = None
    for span in trace.spans:
        start, end = base + 1000 * span.start, base + 1000 * span.end
        if span.service == GATEWAY:
            away = None
            if span.phase not in HOP_LABELS:
                visits[0].spans.append(span)
        elif away is None or away.service != span.service:
            away = ServiceVisit(span.service, instance_of(trace, span.service), start, end, [span])
            visits.append(away)
        else:
            away.spans.append(span)
            away.end = end
    return visits


def instance_of(trace: RequestTrace, service: str) -> str:
    """Which process of a service had a request, as far as its lines say."""
    for entry in reversed(trace.entries):
        if entry.service == service:
            return entry.instance
        if service == WORKER and entry.fields.get("worker"):
            return str(entry.fields["worker"])
    return service


def events_of(trace: RequestTrace, visits: list[ServiceVisit], number: int) -> list[Event]:
    """Slices of one request and of its phases, and the flow through them."""
    gateway = visits[0]
    known = {name: value for name, value in trace.end.items() if name not in HIDDEN}
    known |= {"request_id": trace.request_id, "label": trace.label, "cause": trace.cause}
    events = []
    for visit in visits:
        args = known if visit is gateway else {"request_id": trace.request_id}
        events.append(visit.slice(f"request {trace.request_id[:8]}", "request", visit.start, visit.end, args))
        for span in visit.spans:
            start, end = gateway.start + 1000 * span.start, gateway.start + 1000 * span.end
            events.append(visit.slice(span.phase, "phase", start, end, {"ms": span.ms}))
    flow = [({"ph": "t"}, visit, visit.start) for visit in visits]
    flow[0][0]["ph"] = "s"
    flow.append(({"ph": "f", "bp": "e"}, gateway, (visits[-1].end + gateway.end) / 2))  # back at the gateway
    for kind, visit, at in flow:
        named = {"id": number, "name": "request", "cat": "request", "ts": round(at, 3)}
        events.append({**kind, **named, "pid": visit.pid, "tid": visit.tid})
    return events


def events_of_step(step: StepSpan, pid: int, origin: float) -> list[Event]:
    """A step's slice with its contents, and counters of the worker's blocks and sequences."""
    start, end = microseconds(step.start, origin), microseconds(step.end, step.start)
    args: Event = {name: getattr(step, name) for name in COUNTS}
    args["sequences"] = {f"{request_id[:8]}.{index}": count for request_id, index, count in step.sequences}
    name = f"step {step.step_id}: {len(step.sequences)} sequences, {step.num_tokens} tokens"
    at = {"ph": "C", "pid": pid, "tid": 0, "ts": start}
    blocks = {"used": step.num_used_blocks, "free": step.num_blocks - step.num_used_blocks}
    sequences = {"running": step.num_running, "waiting": step.num_waiting}
    return [
        {"ph": "X", "name": name, "cat": "step", "pid": pid, "tid": STEPS, "ts": start, "dur": end, "args": args},
        at | {"name": "KV blocks", "args": blocks},
        at | {"name": "sequences", "args": sequences},
    ]


def microseconds(at: float, origin: float) -> float:
    """From `origin` to `at`, both in seconds, to the nanosecond."""
    return max(0.0, round((at - origin) * 1e6, 3))
