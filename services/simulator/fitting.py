"""A step-time model fitted to a recorded run, and how steps scatter about it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import mul
from pathlib import Path

import msgspec

from shared.metrics import Summary, summarise
from shared.metrics.steps import RecordedStep, StepWork

MIN_STEPS = 20
NUM_REWEIGHTINGS = 3  # after which single figures move by less than they are worth
MAX_ROUNDS = 5000  # of coordinate descent
STILL = 1e-9  # relative change under which it has arrived
NUM_SLOPES = 3  # context tokens, pairs, sequences
SHARE_PER_KNOT = 8  # recorded steps that a knot needs near it
MIN_ALIKE = 20  # steps of like size, from which one is drawn
LEAST_SECONDS = 1e-6  # of any step: a fit to few and noisy ones can come to nothing, or beyond its last knot to less
LEAST_SHARE = 0.01  # of what a step took, as what is foretold of it counts
LONGEST_PAUSE = 0.1  # seconds between two steps that count; in a longer one the worker was idle
SHIFT = 0.618034  # of the whole: where each worker begins behind the one before it, evenly for any number of them


def read_recording(path: Path) -> list[RecordedStep]:
    """The steps that a worker has written (setting `record_steps`), each with the pause before a next one that waits.

    Raises ValueError naming file and line.
    """
    decoder = msgspec.json.Decoder(RecordedStep)
    steps = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            steps.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    pause = turnaround(steps)
    return [msgspec.structs.replace(step, seconds=step.seconds + pause) for step in steps]


@dataclass
class Fitted:
    """Seconds = a piecewise linear function of the tokens in a step, plus so much per context token, pair and sequence.

    The function has knots where steps were recorded, none of its parts is negative, and beyond its last knot it goes on
    as between the last two: small steps read weights, large ones multiply, and a line through both would miss either.
    """

    knots: Sequence[float]  # tokens
    heights: Sequence[float]  # seconds at each
    slopes: Sequence[float]  # seconds per context token, pair, sequence
    per_arrival: float = 0.0  # seconds that a request takes from the step during which it comes

    def seconds(self, work: StepWork, start: float = 0.0, worker: int = 0) -> float:
        context, pair, sequence = self.slopes
        extra = context * work.num_context + pair * work.num_pairs + sequence * work.num_sequences
        base = sum(w * h for w, h in zip(hats(self.knots, work.num_tokens), self.heights, strict=True))
        return max(base + extra, LEAST_SECONDS)


def fit(steps: Sequence[RecordedStep], arrivals: Sequence[int] = ()) -> Fitted:
    """The least squares of errors, each relative to what is foretold, so that the mean of steps that are alike comes
    out right: relative to what was measured, slow ones would count for little.  Found by reweighting (McCullagh and
    Nelder, "Generalized Linear Models", 1989: variance in proportion to the square of the mean).

    `arrivals`: how many requests came during each step, where that is known.  On a machine that workers and front
    services share, letting a request in takes time from the step that is under way.

    Raises ValueError where too few steps were recorded.
    """
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} recorded steps are too few to fit: at least {MIN_STEPS}")
    knots = choose_knots([step.num_tokens for step in steps])
    rows = [features(knots, step.work) for step in steps]
    if arrivals:
        rows = [[*row, count] for row, count in zip(rows, arrivals, strict=True)]
    foretold = [step.seconds for step in steps]
    for _ in range(1 + NUM_REWEIGHTINGS):
        scaled = [[value / then for value in row] for row, then in zip(rows, foretold, strict=True)]
        targets = [step.seconds / then for step, then in zip(steps, foretold, strict=True)]
        found = non_negative_least_squares(scaled, targets)
        foretold = [
            max(sum(map(mul, row, found)), LEAST_SHARE * step.seconds) for row, step in zip(rows, steps, strict=True)
        ]
    slopes = found[len(knots) : len(knots) + NUM_SLOPES]
    return Fitted(knots, found[: len(knots)], slopes, found[-1] if arrivals else 0.0)


def undisturbed(steps: Sequence[RecordedStep], arrivals: Sequence[int], per_arrival: float) -> list[RecordedStep]:
    """The steps without the time that arriving requests took from them; of each at least half is left."""
    return [
        msgspec.structs.replace(step, seconds=max(0.5 * step.seconds, step.seconds - count * per_arrival))
        for step, count in zip(steps, arrivals, strict=True)
    ]


def errors(model: Fitted, steps: Iterable[RecordedStep]) -> Summary:
    """Relative errors of single steps, absolute values."""
    return summarise(abs(model.seconds(step.work) / step.seconds - 1) for step in steps)


def turnaround(steps: Sequence[RecordedStep], *, at_most: float = 0.002) -> float:
    """Seconds between one step and the next that was waiting for it: the mean pause, without those in which the
    worker had nothing to do (longer than `at_most`)."""
    pauses = (after.start - before.start - before.seconds for before, after in pairwise(steps))
    short = [pause for pause in pauses if 0 <= pause <= at_most]
    return sum(short) / len(short) if short else 0.0


def features(knots: Sequence[float], work: StepWork) -> list[float]:
    return [*hats(knots, work.num_tokens), work.num_context, work.num_pairs, work.num_sequences]


def hats(knots: Sequence[float], x: float) -> list[float]:
    """The weights that interpolate between knots at x; beyond the last they extrapolate, below the first they stay."""
    weights = [0.0] * len(knots)
    if len(knots) == 1 or x <= knots[0]:
        weights[0] = 1.0
        return weights
    right = min(bisect_right(knots, x), len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights[right - 1], weights[right] = 1 - share, share
    return weights


def choose_knots(tokens: Sequence[int]) -> list[float]:
    """About one for each doubling of the tokens, where enough steps were recorded."""
    ordered = sorted(tokens)
    knots = [float(ordered[0])]
    since = 0
    for value in ordered[1:]:
        since += 1
        if value >= 2 * knots[-1] and since >= SHARE_PER_KNOT:
            knots.append(float(value))
            since = 0
    if ordered[-1] > 1.25 * knots[-1] and since >= SHARE_PER_KNOT:
        knots.append(float(ordered[-1]))
    return knots


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Minimise |rows x - targets| over x >= 0, by coordinate descent on the normal equations, columns scaled alike."""
    width = len(rows[0])
    scales = [max(abs(row[j]) for row in rows) or 1.0 for j in range(width)]
    columns = [[row[j] / scales[j] for row in rows] for j in range(width)]
    gram = [[sum(map(mul, left, right)) for right in columns] for left in columns]
    moments = [sum(map(mul, column, targets)) for column in columns]
    x = [0.0] * width
    for _ in range(MAX_ROUNDS):
        before = list(x)
        for j in range(width):
            if gram[j][j] > 0:
                gradient = moments[j] - sum(map(mul, gram[j], x))
                x[j] = max(0.0, x[j] + gradient / gram[j][j])
        if all(abs(now - then) <= STILL * max(1.0, now) for now, then in zip(x, before, strict=True)):
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]


@dataclass
class Alike:
    """Steps of like size, in the order in which they ran; seconds since the first recorded step."""

    first: float  # tokens, the fewest
    ratios: list[tuple[float, float]] = field(default_factory=list)  # when, of what the fit says

    def add(self, others: Alike) -> None:
        self.ratios = sorted(self.ratios + others.ratios)

    def at(self, time: float) -> float:
        """The ratio of the first at this time or later, and after the last of the first."""
        return self.ratios[bisect_left(self.ratios, (time, -inf)) % len(self.ratios)][1]


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
            if self._alike and len(self._alike[-1].ratios) < MIN_ALIKE:
                self._alike[-1].add(alike)
            else:
                self._alike.append(alike)
        if len(self._alike) > 1 and len(self._alike[-1].ratios) < MIN_ALIKE:
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
            alike.ratios.append((self._span, step.seconds / self._model.seconds(step.work)))
        return found
