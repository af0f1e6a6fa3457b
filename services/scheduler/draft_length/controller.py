"""How many draft tokens are worth it: measured, not modelled, and nothing to tune.

For each size of batch the time from one result to the next is measured for each mode; what a mode yields in that time
follows from how many draft tokens are accepted, which is measured per sequence.  The mode with the most tokens per
second is used; one that may be better is tried for a few steps.

Steps become slower and faster for reasons that all modes share: longer contexts, other work on the machine.  That moves
more, and more slowly, than steps differ from their neighbours.  So a mode on trial is measured against the one that was
in use just before, and while one is in use all that its steps take more or less is the drift of all.  Where a step of
either may follow one of the other at no cost, the two take turns during the trial, and meet the same machine.

One trial is off by a tenth or two however long it is, and modes differ by less.  So trials are short and many, all that
they found is kept, and a mode is tried as long as what is known of it leaves room for its being the best (upper
confidence bounds; Auer, Cesa-Bianchi and Fischer, 2002).  The best may owe its place to one lucky trial, and does not
find that out while it is in use; so it is doubted too, until others were held against it.  What trials may lose is
bounded, by so much at first and by a share of all steps after that: a mode that is nearly as good costs nearly nothing
to try, and is tried often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.draft_length.modes import MEMORY, OUTLIER, PLAIN, Cost, ModeTrial, SpeculationMode, believed

TRIAL = 8  # steps for which a mode is used before the next choice
TURNS_WEIGHT = 3  # trials that one counts for in which both modes take turns
SETTLE = 2  # first steps of a mode, which still hold something of the one before
START = 16  # the same at the very start, where much is done for the first time ...
START_SECONDS = 0.2  # ... but no longer than so
ENOUGH = 4  # steps of a trial after which it may end early
NOISE = 0.15  # how far one trial is off
DOUBT = 0.3  # how much better than believed a mode may be that was never tried
CREDIT = 10.0  # steps that trials may lose ...
BUDGET = 0.01  # ... and of each step after that
SWITCH = 1.0  # steps that a trial loses whatever it finds
DRIFT_MEMORY = 6  # steps that the average of the drift looks back
NO_DRAFTS = 0.25  # draft tokens per sequence: with fewer, a trial shows nothing about a mode that wants some
FIRST_LENGTH = 4  # draft tokens, at most, of the first mode that is tried; then up to twice as many as were
CAUTION = 0.4  # of the doubt about a mode, by which it must be better still
HOPELESS = 1.5  # times what a mode may cost to be the best: its trial ends early
PROBE = 128  # steps after which the cheapest other mode is tried whatever its cost; doubles while that stays high
LAST_PROBE = 8192
CHANGE = 0.7  # of what it cost before ...
SURPRISES = 2  # ... as often in turn: then what others cost is not known any more either


class DraftLengthController:
    """The choice of a mode for one size of batch."""

    def __init__(self, modes: Sequence[SpeculationMode]) -> None:
        self.mode = self._best = modes[0]
        self.costs = {mode: Cost() for mode in modes}
        self._trial: SpeculationMode | None = self.mode  # the mode on trial
        self._sample = ModeTrial()  # of it
        self._reference: ModeTrial | None = None  # of the best mode, where the two take turns
        self._num_steps = 0
        self._num_left = TRIAL
        self._num_settling = START
        self._seconds_settling = START_SECONDS
        self._lost = 0.0  # steps, to trials
        self._num_compared = 0  # trials against the best mode, since it is
        self._drift = 1.0  # seconds of a step now for each second in `costs`
        self._limit = float("inf")  # seconds beyond which the mode on trial cannot win
        self._probed = 0.0  # what the mode that is looked at again cost before; 0 where it is no probe
        self._num_surprises = 0
        self._next_probe = PROBE
        self._probe_interval = PROBE

    @property
    def is_due(self) -> bool:
        return self._num_left <= 0 and len(self.costs) > 1

    def record(self, seconds: float, depth: float) -> None:
        """One step of the present mode, with `depth` draft tokens per sequence."""
        self._num_steps += 1
        if self._num_settling and self._seconds_settling > 0:
            self._num_settling -= 1
            self._seconds_settling -= seconds
            return
        self._num_left -= 1
        if self._trial is None:
            cost = self.costs[self.mode]
            cost.depth += (depth - cost.depth) / MEMORY
            self._follow(seconds)
        elif self._reference is not None:
            self._take_turns(self._reference, seconds, depth)
        else:
            self._try(seconds / self._drift, depth)

    def _take_turns(self, reference: ModeTrial, seconds: float, depth: float) -> None:
        is_trial = self.mode == self._trial
        (self._sample if is_trial else reference).record(seconds, depth)
        self.mode = self._best if is_trial or self._trial is None else self._trial

    def _try(self, seconds: float, depth: float) -> None:
        self._sample.record(seconds, depth)
        if len(self._sample) >= ENOUGH and self._sample.seconds > self._limit:
            self._num_left = 0
        if self._num_left <= 0 and len(self.costs) == 1:  # a single mode: no caller asks for a choice
            self._end_trial(self.mode)
            self._num_left = TRIAL

    def _follow(self, seconds: float) -> None:
        """A change of the time that a step of the mode in use takes is a change for all modes: the drift."""
        expected = self.seconds(self.mode)
        if expected > 0 and seconds > 0:
            ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
            self._drift *= 1 + (ratio - 1) / DRIFT_MEMORY

    def seconds(self, mode: SpeculationMode) -> float:
        """What a step of a mode takes now, as far as was measured; 0 where it was not."""
        return self._drift * self.costs[mode].seconds

    def choose(self, expected: Sequence[float], draft_seconds: float) -> None:
        """Take the best mode, or one to be tried.  `expected[k]` are the tokens that k draft tokens yield."""
        tried = self._trial
        num_tried = self._end_trial(tried) if tried is not None else 0
        seconds = believed(self.costs, draft_seconds / self._drift)
        rates = {mode: between(expected, self._depth(mode)) / max(seconds[mode], 1e-9) for mode in seconds}
        if tried is not None:
            self._lost += SWITCH + num_tried * max(0.0, 1 - rates[tried] / rates[self._best])
            self._num_compared += 1
        if (best := self._best_of(rates)) != self._best:
            self._best, self._num_compared = best, 0
        trial = None if tried is not None else self._due_probe(seconds) or self._promising(rates)
        self._num_left, self._trial = TRIAL, trial
        if trial is not None:
            self._limit = HOPELESS * expected[trial.num_draft_tokens] / rates[self._best]
            self._begin_trial(trial)
        self._use(trial or self._best)

    def _begin_trial(self, mode: SpeculationMode) -> None:
        """Where steps of both may follow each other they take turns: so their times are nearest to each other."""
        self._sample, self._reference = ModeTrial(), None
        if mode.is_like(self._best):
            self._reference, self._num_left = ModeTrial(), 2 * TRIAL

    def _use(self, mode: SpeculationMode) -> None:
        if not mode.is_like(self.mode):
            self._num_settling, self._seconds_settling = SETTLE, float("inf")
        self.mode = mode

    def _depth(self, mode: SpeculationMode) -> float:
        return self.costs[mode].depth if self.costs[mode].num_trials else mode.num_draft_tokens

    def _best_of(self, rates: Mapping[SpeculationMode, float]) -> SpeculationMode:
        sure = {
            mode: rate / (1 + CAUTION * self._doubt(mode))
            for mode, rate in rates.items()
            if self.costs[mode].num_trials
        }
        found = max(sure, key=lambda mode: sure[mode])
        return found if sure[found] > rates[self._best] else self._best

    def _promising(self, rates: Mapping[SpeculationMode, float]) -> SpeculationMode | None:
        """The mode that may be better than the best known one, if any, while trials may be lost."""
        if self._lost > CREDIT + BUDGET * self._num_steps:
            return None
        furthest = max(FIRST_LENGTH, 2 * max(mode.num_draft_tokens for mode in rates if self.costs[mode].num_trials))
        hoped = {
            mode: (1 + self._doubt(mode)) * rate
            for mode, rate in rates.items()
            if mode != self._best and mode.num_draft_tokens <= furthest
        }
        found = max(hoped, key=lambda mode: hoped[mode], default=None)
        surely = rates[self._best] * (1 - NOISE / (1 + self._num_compared) ** 0.5)
        return found if found is not None and hoped[found] > surely else None

    def _doubt(self, mode: SpeculationMode) -> float:
        """How much better than believed a mode may be."""
        num_trials = self.costs[mode].num_trials
        return NOISE / num_trials**0.5 if num_trials else DOUBT

    def _end_trial(self, mode: SpeculationMode) -> int:
        """Add what it found to what was known; returns its steps.  Drafts that had just begun, or were elsewhere, are
        no reason against a mode."""
        sample, reference, before = self._sample, self._reference, self._probed
        self._sample, self._reference, self._probed = ModeTrial(), None, 0.0
        if not sample or (mode != PLAIN and sample.depth < NO_DRAFTS):
            if before:  # else the next probe would be due at once, and every other trial one
                self._end_probe(mode, is_surprise=False)
            return len(sample)
        seconds, weight = sample.seconds, 1
        if reference:
            known = self.costs[self._best].seconds
            self._drift, weight = reference.seconds / known, TURNS_WEIGHT
            seconds /= self._drift
        if before:
            self._end_probe(mode, is_surprise=seconds < CHANGE * before)
        self.costs[mode].add(seconds, sample.depth, weight)
        return len(sample)

    def _due_probe(self, seconds: Mapping[SpeculationMode, float]) -> SpeculationMode | None:
        """Now and then a mode that lost long ago: the machine, the load or the draft may be another by now."""
        if self._num_steps < self._next_probe:
            return None
        mode = next(mode for mode in self.costs if mode != self._best)  # without drafts, or with the fewest
        self._probed = seconds[mode]
        return mode

    def _end_probe(self, mode: SpeculationMode, *, is_surprise: bool) -> None:
        self._num_surprises = self._num_surprises + 1 if is_surprise else 0
        self._probe_interval = PROBE if is_surprise else min(2 * self._probe_interval, LAST_PROBE)
        self._next_probe = self._num_steps + (TRIAL if is_surprise else self._probe_interval)
        if self._num_surprises == SURPRISES:
            self._forget(mode)

    def _forget(self, known: SpeculationMode) -> None:
        """What modes with drafts, and the one that is being measured anew, have cost."""
        for mode in self.costs:
            if mode == known or mode != PLAIN:
                self.costs[mode] = Cost()
        self._best, self._lost, self._num_compared, self._num_surprises = known, 0.0, 0, 0


def between(values: Sequence[float], place: float) -> float:
    """A value at a place that may lie between two."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
