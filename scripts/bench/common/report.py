"""The table that every bench_* script prints last, and what `--check` makes of it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.display.tables import aligned

COLUMNS = ("what", "measured", "target", "verdict")


@dataclass(frozen=True)
class Result:
    """One figure and its bound: `at_most` or `at_least`, in the figure's own unit, or neither for information."""

    what: str
    measured: float | None  # None: could not be measured, which misses any target
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        if self.at_most is None and self.at_least is None:
            return False
        if self.measured is None:
            return True
        above = self.at_most is not None and self.measured > self.at_most
        below = self.at_least is not None and self.measured < self.at_least
        return above or below

    @property
    def target(self) -> str:
        bounds = (("<=", self.at_most), (">=", self.at_least))
        return " ".join(f"{sign} {figure(bound)}" for sign, bound in bounds if bound is not None)

    @property
    def verdict(self) -> str:
        word = ("missed" if self.missed else "met") if self.target else ""
        return "  ".join(part for part in (word, self.note) if part)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        measured = "-" if self.measured is None else f"{figure(self.measured)} {self.unit}".rstrip()
        return self.what, measured, self.target, self.verdict


def figure(value: float) -> str:
    """Three significant digits, thousands apart."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def table(lines: Sequence[Result], *, title: str = "") -> str:
    """Aligned columns; figures to the right."""
    text = aligned(COLUMNS, [line.cells for line in lines], left=(0, 3))
    return f"{title}\n{text}" if title else text


def bench_parser(description: str | None, *, has_check: bool = True) -> argparse.ArgumentParser:
    """The options of a bench, usually `--check` among them; its docstring is the help and names the executable."""
    assert description is not None
    named = re.search(r"scripts/\w+", description)
    parser = argparse.ArgumentParser(
        named[0] if named else None, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_check:
        parser.add_argument("--check", action="store_true", help="exit with status 1 where a target is missed")
    return parser


def finish(lines: Sequence[Result], *, check: bool, title: str = "") -> int:
    """Print the table, last of all; returns the exit status."""
    print(f"\n{table(lines, title=title)}", flush=True)
    return int(check and any(line.missed for line in lines))
