"""Tracks where a request's time goes while one service has it.

Invariant: what is booked, together with the phase under way, is the time from the request's arrival until now.  So
nothing is ever clamped on the way: a clock that was set back costs one phase what it gave another, and the hops between
hosts whose clocks differ cancel out.  Only what is shown is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages.latency import LatencyBreakdown
from shared.tracing.phases import HOPS, IN_ORDER, NUM_MISSES, NUM_PHASES, PHASE_LABELS, Miss, Phase

MICROSECONDS = 1e6
LONGEST = 1 << 50  # microseconds, about 35 years: more was never spent
LAST = 1e11  # Unix seconds, in the year 5138
NOTHING = LatencyBreakdown([0] * NUM_PHASES)


class LatencyTracker:
    """Times are Unix seconds; `spent` is microseconds by phase, without the phase under way."""

    __slots__ = ("evicted_ago", "misses", "num_ahead", "num_chunks", "num_preemptions", "phase", "since", "spent")

    def __init__(self, phase: Phase, since: float, latency: LatencyBreakdown = NOTHING) -> None:
        self.spent = list(latency.spent)
        self.phase = phase
        self.since = since
        self.num_ahead = latency.num_ahead
        self.num_chunks = latency.num_chunks
        self.num_preemptions = latency.num_preemptions
        self.misses = list(latency.misses)
        self.evicted_ago = latency.evicted_ago

    def enter(self, phase: Phase, now: float) -> None:
        """The phase under way ends, another begins."""
        self.spent[self.phase] += round((now - self.since) * MICROSECONDS)
        self.phase, self.since = phase, now

    def book(self, phase: Phase, seconds: float) -> None:
        """Give a part of the time under way, from its beginning, to another phase."""
        self.spent[phase] += round(seconds * MICROSECONDS)
        self.since += seconds

    def breakdown(self, now: float) -> LatencyBreakdown:
        """The breakdown to send now."""
        spent = self.spent.copy()
        spent[self.phase] += round((now - self.since) * MICROSECONDS)
        return LatencyBreakdown(
            spent, now, self.num_ahead, self.num_chunks, self.num_preemptions, self.misses, self.evicted_ago
        )


def arrived(latency: LatencyBreakdown, hop: Phase, *, now: float, busy_since: float) -> tuple[LatencyBreakdown, float]:
    """The breakdown of a request that a service takes up now, with the hop booked; and since when it has it.

    A service that has been at work without a pause since `busy_since` had it in its mailbox all the while: that is its
    own time, not the hop's.
    """
    latency = checked(latency)
    sent = latency.stamp or now
    end = now if now <= sent else min(now, max(sent, busy_since))
    account = LatencyTracker(hop, sent, latency)
    return account.breakdown(end), end


def checked(latency: LatencyBreakdown) -> LatencyBreakdown:
    """The breakdown as it came, or an empty one where its numbers are impossible."""
    numbers = (*latency.spent, *latency.misses, latency.num_ahead, latency.num_chunks, latency.num_preemptions)
    makes_sense = (
        len(latency.spent) == NUM_PHASES
        and len(latency.misses) in (0, Miss.NO_STATE, NUM_MISSES)  # that one is said where states are kept
        and abs(latency.stamp) < LAST
        and all(-LONGEST < number < LONGEST for number in (*numbers, latency.evicted_ago))
    )
    return latency if makes_sense else NOTHING


def settled(spent: Sequence[int]) -> list[int]:
    """Microseconds by phase of the same sum without negative ones: what one hop has too little, others have too much,
    the longest first."""
    if min(spent) >= 0:
        return list(spent)
    shown = [max(0, micros) for micros in spent]
    debt = sum(shown) - sum(spent)
    for phase in (*sorted(HOPS, key=lambda hop: -shown[hop]), *sorted(Phase, key=lambda each: -shown[each])):
        taken = min(debt, shown[phase])
        shown[phase] -= taken
        debt -= taken
    return shown


def milliseconds(spent: Sequence[int]) -> dict[str, float]:
    """Of each phase that took time, settled, by its name, in the order of a request's way."""
    micros = settled(spent)
    return {PHASE_LABELS[phase]: micros[phase] / 1000 for phase in IN_ORDER if micros[phase]}
