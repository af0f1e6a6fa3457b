"""A request's time while one service has it: a ledger that is written in.

Invariant: what is booked, together with the phase under way, is the time from the request's arrival until now.  So
nothing is ever clamped on the way: a clock that was set back costs one phase what it gave another, and the hops between
hosts whose clocks differ cancel out.  Only what is shown is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages.ledger import Ledger
from shared.phases import HOPS, IN_ORDER, NUM_MISSES, NUM_PHASES, PHASE_LABELS, Phase

MICROSECONDS = 1e6
LONGEST = 1 << 50  # microseconds, about 35 years: more was never spent
LAST = 1e11  # Unix seconds, in the year 5138
NOTHING = Ledger([0] * NUM_PHASES)


class Account:
    """Times are Unix seconds; `spent` is microseconds by phase, without the phase under way."""

    __slots__ = ("evicted_ago", "misses", "num_ahead", "num_chunks", "num_preemptions", "phase", "since", "spent")

    def __init__(self, phase: Phase, since: float, ledger: Ledger = NOTHING) -> None:
        self.spent = list(ledger.spent)
        self.phase = phase
        self.since = since
        self.num_ahead = ledger.num_ahead
        self.num_chunks = ledger.num_chunks
        self.num_preemptions = ledger.num_preemptions
        self.misses = list(ledger.misses)
        self.evicted_ago = ledger.evicted_ago

    def enter(self, phase: Phase, now: float) -> None:
        """The phase under way ends, another begins."""
        self.spent[self.phase] += round((now - self.since) * MICROSECONDS)
        self.phase, self.since = phase, now

    def book(self, phase: Phase, seconds: float) -> None:
        """Give a part of the time under way, from its beginning, to another phase."""
        self.spent[phase] += round(seconds * MICROSECONDS)
        self.since += seconds

    def ledger(self, now: float) -> Ledger:
        """To be sent now."""
        spent = self.spent.copy()
        spent[self.phase] += round((now - self.since) * MICROSECONDS)
        return Ledger(spent, now, self.num_ahead, self.num_chunks, self.num_preemptions, self.misses, self.evicted_ago)


def arrived(ledger: Ledger, hop: Phase, *, now: float, busy_since: float) -> tuple[Ledger, float]:
    """What a service makes of a ledger that it takes up now: the hop is booked; and since when it has had the request.

    A service that has been at work without a pause since `busy_since` had it in its mailbox all the while: that is its
    own time, not the hop's.
    """
    ledger = checked(ledger)
    sent = ledger.stamp or now
    end = now if now <= sent else min(now, max(sent, busy_since))
    account = Account(hop, sent, ledger)
    return account.ledger(end), end


def checked(ledger: Ledger) -> Ledger:
    """As it came, or an empty one where it makes no sense: what others send is not believed."""
    numbers = (*ledger.spent, *ledger.misses, ledger.num_ahead, ledger.num_chunks, ledger.num_preemptions)
    makes_sense = (
        len(ledger.spent) == NUM_PHASES
        and len(ledger.misses) in (0, NUM_MISSES)
        and abs(ledger.stamp) < LAST
        and all(-LONGEST < number < LONGEST for number in (*numbers, ledger.evicted_ago))
    )
    return ledger if makes_sense else NOTHING


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
