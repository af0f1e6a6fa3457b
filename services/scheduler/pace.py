"""How many draft tokens are worth it: measured, not modelled, and nothing to tune.

There are several ways to run a step, its arms: without drafts (two steps in flight), or with up to so many draft tokens
per sequence, with or without the draft running ahead of their verification.  For each size of batch, by powers of two,
the time from one result to the next is measured for each arm; what an arm yields in that time follows from how many
draft tokens are accepted, which is measured per sequence.  The arm with most tokens per second is used.  One that may
be better is tried for a few steps, the more seldom the worse it proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TRIAL = 8  # steps for which an arm is used before the next choice
SETTLE = 2  # first steps of an arm, which still hold something of the one before
MEMORY = 16  # steps that a moving average looks back
OUTLIER = 3.0  # times the average: what is longer was something else
FIRST_REST = 128  # steps until an arm that proved worse may be tried again; doubles
LAST_REST = 8192
HOPE = 1.2  # how much better than measured an arm may have become
FIRST_LENGTH = 4  # draft tokens, at most, of the first arm that is tried; then up to twice as many as were
PROBE = 1024  # steps after which the cheapest other arm is tried, whatever it cost before; doubles where it still does
CHANGE = 0.7  # of what it cost before: then what others cost is not known any more either
HOPELESS = 1.5  # times what an arm may cost to be the best: its trial ends early
DRAFT_SHARE = 0.1  # of a plain step: what a draft token is believed to cost before one was measured
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Arm(NamedTuple):
    """One way to run a step."""

    num_draft_tokens: int  # per sequence, at most
    runs_ahead: bool = False


PLAIN = Arm(0)


def yields(shares: Iterable[float], longest: int) -> list[float]:
    """Tokens per sequence and step with 0, 1 ... `longest` draft tokens: the mean of 1 + share + share ** 2 ..."""
    totals, count = [0.0] * (longest + 1), 0
    for share in shares:
        count += 1
        term = total = 1.0
        for index in range(longest + 1):
            totals[index] += total
            term *= share
            total += term
    return [total / max(1, count) for total in totals]


@dataclass(slots=True)
class Cost:
    """What an arm has cost."""

    seconds: float = 0.0  # from one result to the next
    depth: float = 0.0  # draft tokens that a sequence really had
    num_steps: int = 0
    tried_at: int = 0
    rest: int = FIRST_REST

    def record(self, seconds: float, depth: float) -> None:
        self.num_steps += 1
        weight = 1 / min(self.num_steps, MEMORY)
        if self.num_steps > 2:
            seconds = min(seconds, OUTLIER * self.seconds)
        self.seconds += weight * (seconds - self.seconds)
        self.depth += weight * (depth - self.depth)


class Pace:
    """The choice of an arm for one size of batch."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arm = arms[0]
        self.costs = {arm: Cost() for arm in arms}
        self._num_steps = 0
        self._num_left = TRIAL
        self._num_settling = SETTLE
        self._limit = float("inf")  # seconds beyond which the arm on trial cannot win
        self._probe: tuple[Arm, float] | None = None  # the arm that is tried again, and what it cost before
        self._next_probe = PROBE
        self._probe_interval = PROBE

    @property
    def is_due(self) -> bool:
        return self._num_left <= 0 and len(self.costs) > 1

    def disturbed(self) -> None:
        """Something else was in between: the next steps may still hold something of it."""
        self._num_settling = SETTLE

    def record(self, seconds: float, depth: float) -> None:
        """One step of the present arm, with `depth` draft tokens per sequence."""
        self._num_steps += 1
        if self._num_settling:
            self._num_settling -= 1
            return
        self._num_left -= 1
        cost = self.costs[self.arm]
        cost.record(seconds, depth)
        if cost.num_steps % TRIAL >= 2 and cost.seconds > self._limit:
            self._num_left = 0

    def choose(self, expected: Sequence[float], draft_seconds: float) -> None:
        """Take the best arm, or one to be tried.  `expected[k]` are the tokens that k draft tokens yield."""
        self._end_probe()
        best = max(
            (arm for arm, cost in self.costs.items() if cost.num_steps), key=lambda arm: self._rate(arm, expected)
        )
        self.costs[best].rest = FIRST_REST
        trial = self._promising(best, expected, draft_seconds) or self._due_probe(best, draft_seconds)
        self._num_left, self._limit = TRIAL, float("inf")
        if trial is not None:
            self._limit = HOPELESS * expected[trial.num_draft_tokens] / self._rate(best, expected)
            self._begin_trial(self.costs[trial])
        chosen = trial or best
        if chosen != self.arm:
            self.arm, self._num_settling = chosen, SETTLE

    def _promising(self, best: Arm, expected: Sequence[float], draft_seconds: float) -> Arm | None:
        """The arm that may be better than the best known one, if any, and has not been tried for long enough."""
        furthest = max(
            FIRST_LENGTH, 2 * max(arm.num_draft_tokens for arm, cost in self.costs.items() if cost.num_steps)
        )
        hoped = {
            arm: self._hoped_rate(arm, expected, draft_seconds)
            for arm, cost in self.costs.items()
            if arm != best and self._may_try(cost) and arm.num_draft_tokens <= furthest
        }
        found = max(hoped, key=lambda arm: hoped[arm], default=None)
        return found if found is not None and hoped[found] > self._rate(best, expected) else None

    def _begin_trial(self, cost: Cost) -> None:
        cost.tried_at = self._num_steps
        cost.rest = min(2 * cost.rest, LAST_REST)
        cost.num_steps = 0  # what is measured now counts

    def _due_probe(self, best: Arm, draft_seconds: float) -> Arm | None:
        """Now and then an arm that lost long ago: the machine, the load or the draft may be another by now."""
        if self._num_steps < self._next_probe:
            return None
        arm = next(arm for arm in self.costs if arm != best)  # without drafts, or with the fewest
        cost = self.costs[arm]
        self._probe = arm, cost.seconds if cost.num_steps else self._hoped_seconds(arm, draft_seconds)
        return arm

    def _end_probe(self) -> None:
        if self._probe is None:
            return
        arm, before = self._probe
        self._probe = None
        self._probe_interval = min(2 * self._probe_interval, LAST_REST)
        if self.costs[arm].seconds < CHANGE * before:
            self._probe_interval = PROBE
            for other, cost in self.costs.items():
                if other not in (arm, PLAIN):
                    cost.num_steps, cost.rest = 0, FIRST_REST
        self._next_probe = self._num_steps + self._probe_interval

    def _may_try(self, cost: Cost) -> bool:
        return not cost.num_steps or self._num_steps - cost.tried_at >= cost.rest

    def _rate(self, arm: Arm, expected: Sequence[float]) -> float:
        cost = self.costs[arm]
        return between(expected, cost.depth) / cost.seconds if cost.seconds else 0.0

    def _hoped_rate(self, arm: Arm, expected: Sequence[float], draft_seconds: float) -> float:
        cost = self.costs[arm]
        if cost.num_steps:
            return HOPE * self._rate(arm, expected)
        return expected[arm.num_draft_tokens] / max(self._hoped_seconds(arm, draft_seconds), 1e-9)

    def _hoped_seconds(self, arm: Arm, draft_seconds: float) -> float:
        """What an arm that was never used would cost: on the line through those that were, on either side of it."""
        known = [other for other, cost in self.costs.items() if cost.num_steps]
        alike = [other for other in known if other.runs_ahead == arm.runs_ahead or other == PLAIN]
        points = sorted((other.num_draft_tokens, self.costs[other].seconds) for other in alike)
        per_token = draft_seconds or DRAFT_SHARE * self.costs[known[0]].seconds
        if arm.runs_ahead and (len(points) < 2):
            return self._hoped_seconds(Arm(arm.num_draft_tokens), draft_seconds) - per_token * arm.num_draft_tokens / 2
        return on_the_line(points, arm.num_draft_tokens, per_token / 2 if arm.runs_ahead else per_token)


def on_the_line(points: Sequence[tuple[int, float]], place: int, least_slope: float) -> float:
    """The value at `place`, between the nearest of sorted `points`; beyond the last one it grows as it did before,
    but for the step from none to some, which is not like the others."""
    above = next((index for index, (x, _) in enumerate(points) if x >= place), len(points))
    if above == 0:
        (x, y), slope = points[0], least_slope
    elif above < len(points) or len(points) > 1:
        above = min(above, len(points) - 1)
        (x, y), (right, higher) = points[above - 1], points[above]
        slope = (higher - y) / (right - x)
        if place > right:
            x, y, slope = right, higher, max(slope, least_slope) if x else least_slope
    else:
        (x, y), slope = points[0], least_slope
    return y + slope * (place - x)


def between(values: Sequence[float], place: float) -> float:
    """A value at a place that may lie between two."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def arms_of(fixed: int, longest: int) -> list[Arm]:
    """The one that was asked for, or all there are."""
    if fixed:
        return [Arm(fixed)]
    counts = [count for count in STEPS if count <= longest]
    return [PLAIN, *(Arm(count) for count in counts), *(Arm(count, runs_ahead=True) for count in counts)]
