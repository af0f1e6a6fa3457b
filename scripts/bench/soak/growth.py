"""How the memory of each service went: samples of its resident bytes, and what they say of growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median

from scripts.bench.common.report import Result

MIB = 1 << 20
WINDOW = 0.1  # of the whole time: a figure is the median of so much, since single samples jump


@dataclass
class Curve:
    """Resident bytes of one service over the seconds since the load began."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, seconds: float, resident: int) -> None:
        self.times.append(seconds)
        self.sizes.append(resident)

    @property
    def at_third(self) -> float:
        """Around the end of the first third."""
        return self._around(self.times[-1] / 3)

    @property
    def at_end(self) -> float:
        return self._around(self.times[-1])

    @property
    def growth(self) -> float:
        """Percent, from the first third to the end."""
        return 100 * (self.at_end / self.at_third - 1)

    @property
    def slope(self) -> float:
        """Bytes an hour, over the last two thirds."""
        later = [(time, size) for time, size in zip(self.times, self.sizes, strict=True) if time >= self.times[-1] / 3]
        if len(later) < 2:
            return 0.0
        return 3600 * linear_regression(*zip(*later, strict=True)).slope

    def _around(self, middle: float) -> float:
        half = WINDOW * self.times[-1] / 2
        near = [size for time, size in zip(self.times, self.sizes, strict=True) if abs(time - middle) <= half]
        return median(near or self.sizes[-1:])


def lines(curves: Iterable[tuple[str, Curve]], bound: float) -> Sequence[Result]:
    """A line for each service: how much it has grown in percent, which may be at most `bound`."""
    return [
        Result(
            name,
            round(curve.growth, 2),
            "%",
            at_most=bound,
            note=f"{curve.sizes[0] / MIB:.1f} MiB at first, {curve.at_third / MIB:.1f} at a third, "
            f"{curve.at_end / MIB:.1f} at the end; {curve.slope / MIB:+.2f} MiB/h",
        )
        for name, curve in curves
    ]
