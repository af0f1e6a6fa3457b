"""How steps scatter about what a fit says of them: as they did where they were recorded, and one after another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.simulator.fitting import Fitted
from shared.metrics.steps import RecordedStep, StepWork

MIN_ALIKE = 20  # steps of like size, from which one is drawn
LONGEST_PAUSE = 0.1  # seconds between two steps; more of it tells nothing of how long steps take
SHIFT = 0.618034  # of the whole: where each worker begins behind the one before it, evenly for any number of them


@dataclass
class Alike:
    """Steps of like size, in the order in which they ran."""

    first: float  # tokens, the fewest
    times: list[float] = field(default_factory=list)  # seconds since the first recorded step
    ratios: list[float] = field(default_factory=list)  # of what the fit says

    def add(self, others: Alike) -> None:
        pairs = sorted(zip(self.times + others.times, self.ratios + others.ratios, strict=True))
        self.times, self.ratios = [time for time, _ in pairs], [ratio for _, ratio in pairs]

    def at(self, time: float) -> float:
        """The ratio of the first at this time or later, and after the last of the first."""
        return self.ratios[bisect_left(self.times, time) % len(self.ratios)]


class Scattered:
    """What a fit says of a step, times what a recorded step of like size took of what the fit says of that.

    A median is foretold well enough by a fit; the slowest of a hundred is not, which is slow because its steps were.
    And slow steps come together: a machine that does other things too is slow for some milliseconds or minutes, in
    which a queue grows.  So the recorded step is the one that ran then: the recording is gone through again and again
    as time passes.  The same run comes out every time.
    """

    def __init__(self, model: Fitted, steps: Sequence[RecordedStep], factor: float = 1.0) -> None:
        """`factor`: how many times as long steps take as those that were recorded."""
        self._model = model
        self._factor = factor
        self._alike: list[Alike] = []
        self._span = 0.0  # seconds
        for alike in self._by_knot(steps):
            if self._alike and len(self._alike[-1].times) < MIN_ALIKE:
                self._alike[-1].add(alike)
            else:
                self._alike.append(alike)
        if len(self._alike) > 1 and len(self._alike[-1].times) < MIN_ALIKE:
            few = self._alike.pop()
            self._alike[-1].add(few)
        self._firsts = [alike.first for alike in self._alike]

    def seconds(self, work: StepWork, start: float = 0.0, worker: int = 0) -> float:
        alike = self._alike[max(0, bisect_right(self._firsts, work.num_tokens) - 1)]
        time = (start + worker * SHIFT * self._span) % self._span if self._span else 0.0
        return self._factor * alike.at(time) * self._model.seconds(work)

    def _by_knot(self, steps: Sequence[RecordedStep]) -> list[Alike]:
        """The steps from each of the fit's knots to the next."""
        found = [Alike(knot) for knot in self._model.knots]
        for before, step in zip([steps[0], *steps], steps, strict=False):
            self._span += min(max(0.0, step.start - before.start), before.seconds + LONGEST_PAUSE)
            alike = found[max(0, bisect_right(self._model.knots, step.num_tokens) - 1)]
            alike.times.append(self._span)
            alike.ratios.append(step.seconds / self._model.seconds(step.work))
        return found
