"""How steps scatter about what a fit says of them: as they did where they were recorded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from services.simulator.fitting import Fitted
from shared.metrics.steps import RecordedStep, StepWork

MIN_ALIKE = 20  # steps of like size, from which one is drawn


class Scattered:
    """What a fit says of a step, times what a recorded step of like size took of what the fit says of that.

    A median is foretold well enough by a fit; the slowest of a hundred is not, which is slow because its steps were.
    Which recorded step it is hangs on what the step computes and on nothing else: the same run comes out every time.
    """

    def __init__(self, model: Fitted, steps: Sequence[RecordedStep], factor: float = 1.0) -> None:
        """`factor`: how many times as long steps take as those that were recorded."""
        self._model = model
        self._factor = factor
        self._firsts: list[float] = []  # the fewest tokens of each class
        self._ratios: list[list[float]] = []
        for first, ratios in zip(model.knots, self._by_knot(steps), strict=True):
            if not self._ratios or len(self._ratios[-1]) >= MIN_ALIKE:
                self._firsts.append(first)
                self._ratios.append([])
            self._ratios[-1] += ratios
        if len(self._ratios) > 1 and len(self._ratios[-1]) < MIN_ALIKE:
            self._firsts.pop()
            self._ratios[-2:] = [self._ratios[-2] + self._ratios[-1]]

    def seconds(self, work: StepWork) -> float:
        ratios = self._ratios[max(0, bisect_right(self._firsts, work.num_tokens) - 1)]
        drawn = hash((work.num_tokens, work.num_context, work.num_pairs)) % len(ratios)
        return self._factor * ratios[drawn] * self._model.seconds(work)

    def _by_knot(self, steps: Sequence[RecordedStep]) -> list[list[float]]:
        """What the steps from each knot to the next took, of what the fit says."""
        found: list[list[float]] = [[] for _ in self._model.knots]
        for step in steps:
            place = max(0, bisect_right(self._model.knots, step.num_tokens) - 1)
            found[place].append(step.seconds / self._model.seconds(step.work))
        return found
