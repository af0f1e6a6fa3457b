"""The ways to run a step where there are drafts, and what each is believed to cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

MEMORY = 64  # steps that a moving average looks back
TRIALS = 15  # of a mode, the last ones, that count
OUTLIER = 1.5  # times the median: what is longer was something else
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
COMMON_SENSE = 3.0  # weight, in trials, of the line's value for a mode beside the measured one
STIFFNESS = 2.0  # weight, in trials times draft tokens squared, of the draft's own time in the line's slope
DRAFT_SHARE = 0.1  # of a plain step: what a draft token is believed to cost before one was measured
HIDDEN = 0.5  # of the draft's time where it runs ahead, before that was measured


class SpeculationMode(NamedTuple):
    """One way to run a step."""

    num_draft_tokens: int  # per sequence, at most
    runs_ahead: bool = False

    def is_like(self, other: SpeculationMode) -> bool:
        """Whether a step of this mode takes after one of the other what it takes after one of its own."""
        return self == other or (self.runs_ahead == other.runs_ahead and PLAIN not in (self, other))


PLAIN = SpeculationMode(0)


def modes_of(fixed: int, longest: int, *, may_run_ahead: bool = True) -> list[SpeculationMode]:
    """The one that was asked for, or all there are."""
    if fixed:
        return [SpeculationMode(fixed)]
    counts = [*(count for count in LENGTHS if count < longest), longest]
    ahead = [SpeculationMode(count, runs_ahead=True) for count in counts] if may_run_ahead else []
    return [PLAIN, *(SpeculationMode(count) for count in counts), *ahead]


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


class ModeTrial:
    """What one trial of a mode found."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._depths: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    def record(self, seconds: float, depth: float) -> None:
        self._seconds.append(seconds)
        self._depths.append(depth)

    @property
    def seconds(self) -> float:
        """Of a step.  The mean, since results may come in pairs, a long time and then a short one; without what
        something else on the machine took."""
        most = OUTLIER * median(self._seconds)
        return fmean(min(seconds, most) for seconds in self._seconds)

    @property
    def depth(self) -> float:
        return fmean(self._depths) if self._depths else 0.0


class Cost:
    """What a mode has cost: the median of its trials.  A machine may be much faster for a tenth of a second now and
    then: a trial that begins or ends with such a time is an outlier."""

    def __init__(self) -> None:
        self.seconds = 0.0  # from one result to the next
        self.depth = 0.0  # draft tokens that a sequence really had
        self._trials: deque[tuple[float, float]] = deque(maxlen=TRIALS)  # the same of each

    @property
    def num_trials(self) -> int:
        """Of those that count: what was long ago does not."""
        return len(self._trials)

    def add(self, seconds: float, depth: float, weight: int = 1) -> None:
        """What one more trial found, which counts for so many."""
        self._trials.extend([(seconds, depth)] * weight)
        self.seconds = median(seconds for seconds, _ in self._trials)
        self.depth = fmean(depth for _, depth in self._trials)


class FittedLine(NamedTuple):
    """Seconds of a step by draft tokens."""

    start: float
    slope: float

    def at(self, depth: float) -> float:
        return self.start + self.slope * depth


def fitted(costs: Sequence[Cost], slope: float) -> FittedLine:
    """Least squares over what was measured, each mode by its trials; `slope` is what is believed before that."""
    weights = [cost.num_trials for cost in costs]
    total = sum(weights)
    depth = sum(w * cost.depth for w, cost in zip(weights, costs, strict=True)) / total
    seconds = sum(w * cost.seconds for w, cost in zip(weights, costs, strict=True)) / total
    spread = sum(w * (cost.depth - depth) ** 2 for w, cost in zip(weights, costs, strict=True))
    common = sum(w * (cost.depth - depth) * (cost.seconds - seconds) for w, cost in zip(weights, costs, strict=True))
    slope = max(0.0, (common + STIFFNESS * slope) / (spread + STIFFNESS))
    return FittedLine(seconds - slope * depth, slope)


def believed(costs: Mapping[SpeculationMode, Cost], draft_seconds: float) -> dict[SpeculationMode, float]:
    """Seconds that a step of each mode takes: modes with drafts lie near a line, one for each way to wait for them, so
    that a measurement of one mode informs about all.  At least one mode was measured."""
    tried = {mode: cost for mode, cost in costs.items() if cost.num_trials}
    anchor = tried.get(PLAIN) or next(iter(tried.values()))
    per_token = draft_seconds or DRAFT_SHARE * anchor.seconds
    waiting = _line(tried, False, FittedLine(anchor.seconds, per_token))
    ahead = _line(tried, True, FittedLine(waiting.start, waiting.slope - per_token * HIDDEN))
    return {mode: _believed(mode, costs[mode], ahead if mode.runs_ahead else waiting) for mode in costs}


def _line(tried: Mapping[SpeculationMode, Cost], runs_ahead: bool, guess: FittedLine) -> FittedLine:
    alike = [cost for mode, cost in tried.items() if mode != PLAIN and mode.runs_ahead == runs_ahead]
    return fitted(alike, guess.slope) if alike else guess


def _believed(mode: SpeculationMode, cost: Cost, line: FittedLine) -> float:
    if not cost.num_trials:
        return line.at(mode.num_draft_tokens)
    if mode == PLAIN:
        return cost.seconds
    return (cost.num_trials * cost.seconds + COMMON_SENSE * line.at(cost.depth)) / (cost.num_trials + COMMON_SENSE)
