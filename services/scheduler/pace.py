"""How many draft tokens are worth it: measured, not modelled, and nothing to tune.

For each size of batch the time from one result to the next is measured for each arm; what an arm yields in that time
follows from how many draft tokens are accepted, which is measured per sequence.  The arm with most tokens per second is
used.  One that may be better is tried for a few steps, the more seldom the more often it was tried in vain.

Steps become slower and faster for reasons that all arms share: longer contexts, other work on the machine.  That moves
more, and more slowly, than steps differ from their neighbours.  So an arm on trial is measured against the one that was
in use just before, and while one is in use all that its steps take more or less is the drift of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.arms import FEW, MEMORY, OUTLIER, PLAIN, Arm, Cost, believed

TRIAL = 8  # steps for which an arm is used before the next choice
SETTLE = 2  # first steps of an arm, which still hold something of the one before
START = 16  # the same at the very start, where much is done for the first time ...
START_SECONDS = 0.2  # ... but no longer than so
KEPT = 4  # steps that what an arm cost before weighs in its next trial
FIRST_REST = 128  # steps until an arm that was tried in vain may be tried again; doubles
LAST_REST = 8192
DOUBT = 0.3  # how much better than believed an arm may be that was never tried ...
DOUBT_TRIED = 0.12  # and after one trial; half of it after two, a third ...
DRIFT_MEMORY = 6  # steps that the average of the drift looks back
NO_DRAFTS = 0.25  # draft tokens per sequence: with fewer, a trial says nothing of an arm that wants some
LOYALTY = 1.02  # how much better another arm must be
FIRST_LENGTH = 4  # draft tokens, at most, of the first arm that is tried; then up to twice as many as were
HOPELESS = 1.3  # times what an arm may cost to be the best: its trial ends early
PROBE = 128  # steps after which the cheapest other arm is tried, whatever it cost before; doubles where it still does
CHANGE = 0.7  # of what it cost before: then what others cost is not known any more either


@dataclass(slots=True)
class Trials:
    """When an arm was tried."""

    num: int = 0
    last: int = 0  # step
    rest: int = FIRST_REST


class Pace:
    """The choice of an arm for one size of batch."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arm = self._best = arms[0]
        self.costs = {arm: Cost() for arm in arms}
        self._trials = {arm: Trials() for arm in arms}
        self._trials[self.arm].num = 1
        self._num_steps = 0
        self._num_left = TRIAL
        self._num_settling = START
        self._seconds_settling = START_SECONDS
        self._is_on_trial = True
        self._drift = 1.0  # seconds of a step now for each second in `costs`
        self._limit = float("inf")  # seconds beyond which the arm on trial cannot win
        self._probe: tuple[Arm, float] | None = None  # the arm that is looked at again, and what it cost before
        self._next_probe = PROBE
        self._probe_interval = PROBE

    @property
    def is_due(self) -> bool:
        return self._num_left <= 0 and len(self.costs) > 1

    def record(self, seconds: float, depth: float) -> None:
        """One step of the present arm, with `depth` draft tokens per sequence."""
        self._num_steps += 1
        if self._num_settling and self._seconds_settling > 0:
            self._num_settling -= 1
            self._seconds_settling -= seconds
            return
        self._num_left -= 1
        cost = self.costs[self.arm]
        if not self._is_on_trial:
            cost.depth += (depth - cost.depth) / MEMORY
            self._follow(seconds)
            return
        cost.record(seconds / self._drift, depth)
        if cost.num_steps >= KEPT + FEW and cost.seconds > self._limit:
            self._num_left = 0

    def _follow(self, seconds: float) -> None:
        """What a step of the arm in use takes is what it costs: whatever has changed has changed for all."""
        expected = self.seconds(self.arm)
        if expected > 0 and seconds > 0:
            ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
            self._drift *= 1 + (ratio - 1) / DRIFT_MEMORY

    def seconds(self, arm: Arm) -> float:
        """What a step of an arm takes now, as far as was measured; 0 where it was not."""
        return self._drift * self.costs[arm].seconds

    def choose(self, expected: Sequence[float], draft_seconds: float) -> None:
        """Take the best arm, or one to be tried.  `expected[k]` are the tokens that k draft tokens yield."""
        self._end_trial()
        self._end_probe()
        seconds = believed(self.costs, draft_seconds / self._drift)
        rates = {arm: between(expected, self._depth(arm)) / max(seconds[arm], 1e-9) for arm in seconds}
        self._best = self._best_of(rates)
        trial = None if self._is_on_trial else self._promising(rates) or self._due_probe(seconds)
        self._num_left, self._limit = TRIAL, float("inf")
        self._is_on_trial = trial is not None
        if trial is not None:
            self._limit = HOPELESS * expected[trial.num_draft_tokens] / rates[self._best]
            self._begin_trial(trial)
        self._use(trial or self._best)

    def _use(self, arm: Arm) -> None:
        if arm != self.arm:
            self.arm, self._num_settling, self._seconds_settling = arm, SETTLE, float("inf")

    def _depth(self, arm: Arm) -> float:
        return self.costs[arm].depth if self.costs[arm].num_steps else arm.num_draft_tokens

    def _best_of(self, rates: Mapping[Arm, float]) -> Arm:
        found = max((arm for arm in rates if self.costs[arm].num_steps), key=lambda arm: rates[arm])
        return found if rates[found] > LOYALTY * rates[self._best] else self._best

    def _promising(self, rates: Mapping[Arm, float]) -> Arm | None:
        """The arm that may be better than the best known one, if any, and has not been tried for long enough."""
        furthest = max(FIRST_LENGTH, 2 * max(arm.num_draft_tokens for arm in rates if self.costs[arm].num_steps))
        hoped = {
            arm: (1 + self._doubt(arm)) * rate
            for arm, rate in rates.items()
            if arm != self._best and self._may_try(self._trials[arm]) and arm.num_draft_tokens <= furthest
        }
        found = max(hoped, key=lambda arm: hoped[arm], default=None)
        return found if found is not None and hoped[found] > rates[self._best] else None

    def _doubt(self, arm: Arm) -> float:
        """How much better than believed an arm may be."""
        return DOUBT_TRIED / self._trials[arm].num if self.costs[arm].num_steps else DOUBT

    def _may_try(self, trials: Trials) -> bool:
        return not trials.num or self._num_steps - trials.last >= trials.rest

    def _begin_trial(self, arm: Arm) -> None:
        trials = self._trials[arm]
        if trials.num:
            trials.rest = min(2 * trials.rest, LAST_REST)
        trials.num += 1
        trials.last = self._num_steps
        self.costs[arm].num_steps = min(self.costs[arm].num_steps, KEPT)  # what is measured now counts most

    def _end_trial(self) -> None:
        """Drafts that had just begun, or were elsewhere, are no reason against an arm."""
        if self._is_on_trial and self.arm != PLAIN and self.costs[self.arm].depth < NO_DRAFTS:
            self.costs[self.arm] = Cost()

    def _due_probe(self, seconds: Mapping[Arm, float]) -> Arm | None:
        """Now and then an arm that lost long ago: the machine, the load or the draft may be another by now."""
        if self._num_steps < self._next_probe:
            return None
        arm = next(arm for arm in self.costs if arm != self._best)  # without drafts, or with the fewest
        self._probe = arm, seconds[arm]
        return arm

    def _end_probe(self) -> None:
        if self._probe is None:
            return
        arm, before = self._probe
        self._probe = None
        self._probe_interval = min(2 * self._probe_interval, LAST_REST)
        if self.costs[arm].seconds < CHANGE * before:
            self._probe_interval = PROBE
            self._forget(arm)
        self._next_probe = self._num_steps + self._probe_interval

    def _forget(self, known: Arm) -> None:
        """What arms with drafts, but for the one just measured, have cost."""
        for arm in self.costs:
            if arm not in (known, PLAIN):
                self.costs[arm], self._trials[arm] = Cost(), Trials()
        self._best = known


def between(values: Sequence[float], place: float) -> float:
    """A value at a place that may lie between two."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
