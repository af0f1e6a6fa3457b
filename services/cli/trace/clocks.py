"""Whose clock is wrong by how much, found out from what cannot have happened before what.

A request is received before it is tokenised, tokenised before it is queued, and so on, whatever the clocks say.  Each
such pair at two processes bounds how far their clocks are apart: t(effect) + offset >= t(cause) + offset.  These are
difference constraints; longest paths from the process of reference give the least offsets that satisfy them, longest
paths to it the greatest, and any mean of two solutions is one.  Where clocks agree nothing is changed.

A busy process writes its lines late, which looks like a clock that is ahead; so of all bounds the median one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf as INFINITY
from math import isinf
from statistics import median

from services.cli.trace.reading import LogEntry
from services.cli.trace.requests import Logs, RequestTrace

SLACK = 0.02  # seconds: lines are written a moment after what they tell
MOMENT = 1e-6  # seconds
ORDER = (  # a request's way; the lines of a later group come after all of an earlier one
    ("request_received",),
    ("request_tokenized",),
    ("request_queued",),
    ("sequence_scheduled",),
    ("sequence_admitted",),
    ("sequence_finished",),
    ("stream_finished",),
    ("request_finished",),
)
PLACE = {event: place for place, events in enumerate(ORDER) for event in events}

Pair = tuple[str, str]  # the process of a cause, and that of its effect


def offsets(traces: Iterable[RequestTrace]) -> dict[str, float]:
    """Seconds to add to the times of each instance; the one with the most lines is right.  Empty where all agree."""
    found: dict[Pair, list[float]] = {}
    lines: Counter[str] = Counter()
    for trace in traces:
        lines.update(entry.instance for entry in trace.entries)
        note_gaps(trace, found)
    gaps = {pair: median(seconds) - SLACK for pair, seconds in found.items()}
    if not lines or all(gap <= 0 for gap in gaps.values()):
        return {}
    reference = lines.most_common(1)[0][0]
    least = longest_paths(reference, gaps, len(lines))
    most = longest_paths(reference, {(b, a): gap for (a, b), gap in gaps.items()}, len(lines))
    bounds = {name: (least.get(name, -INFINITY), -most.get(name, -INFINITY)) for name in lines}
    moved = {name: 0.0 if low <= 0 <= high else between(low, high) for name, (low, high) in bounds.items()}
    if all(moved[b] >= moved[a] + gap for (a, b), gap in gaps.items()):
        return moved  # no clock is moved that need not be
    return {name: between(low, high) for name, (low, high) in bounds.items()}


def note_gaps(trace: RequestTrace, found: dict[Pair, list[float]]) -> None:
    """What one request says of the clocks of those who had it."""
    for cause, effect in pairwise(way_of(trace)):
        if cause.instance != effect.instance:
            found.setdefault((cause.instance, effect.instance), []).append(cause.time - effect.time)


def way_of(trace: RequestTrace) -> list[LogEntry]:
    """The first line of each kind, in the order in which they must have come about."""
    firsts: dict[int, LogEntry] = {}
    for entry in trace.entries:
        place = PLACE.get(entry.event)
        if place is not None and entry.fields.get("index", 0) == 0 and place not in firsts:
            firsts[place] = entry
    return [firsts[place] for place in sorted(firsts)]


def longest_paths(start: str, gaps: Mapping[Pair, float], num_nodes: int) -> dict[str, float]:
    """Bellman and Ford's; where clocks were set in between, rounds end without an answer that satisfies all."""
    found = {start: 0.0}
    for _ in range(num_nodes):
        changed = False
        for (cause, effect), gap in gaps.items():
            if cause in found and effect != start and found[cause] + gap > found.get(effect, float("-inf")):
                found[effect] = found[cause] + gap
                changed = True
        if not changed:
            break
    return found


def between(low: float, high: float) -> float:
    """The middle; where one side is open, what is nearest to zero."""
    if isinf(low) or isinf(high):
        return min(max(0.0, low), high)
    return (low + high) / 2


def align(logs: Logs) -> dict[str, float]:
    """Move all times of `logs` onto one clock; returns by how much each process's was moved, in seconds."""
    found = offsets(logs.traces)
    if found:
        for entry in [*logs.steps, *(entry for trace in logs.traces for entry in trace.entries)]:
            entry.time += found.get(entry.instance, 0.0)
        for trace in logs.traces:
            if trace.last is not None:
                trace.offset = found.get(trace.last.instance, 0.0)
            for cause, effect in pairwise(way_of(trace)):  # what is left is within the slack
                effect.time = max(effect.time, cause.time + MOMENT)
            trace.entries.sort(key=lambda entry: entry.time)
        logs.traces.sort(key=lambda trace: trace.start)
        logs.steps.sort(key=lambda entry: entry.time)
    return found
