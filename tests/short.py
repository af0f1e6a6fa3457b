"""Which tests a shorter run plays: `scripts/test` and `scripts/test fast`, where `scripts/test all` plays every one.

tests/short.txt and tests/fast.txt say of each function that takes long how many of its parameter sets are played; all
others are played whole.  The sets are spread evenly over those that there are, so the first one is always among them.

    python -m tests.short short JUNIT.xml     write that table anew from the times of a run of everything
    python -m tests.short fast JUNIT.xml      the other, from those of a run of what the first one leaves (--only short)

JUNIT.xml is what pytest --junitxml=JUNIT.xml writes.  Lines that end with `by hand` stay as they are.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar
from xml.etree import ElementTree


class Budget(NamedTuple):
    """How long a function's tests may take."""

    seconds: float  # its sets together
    most_seconds: float  # the one set of a function whose sets take longer than that each


BUDGETS = {"short": Budget(2.5, 5.0), "fast": Budget(0.3, 0.6)}
BY_HAND = "by hand"

T = TypeVar("T")


def table_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.txt")


def lines_of(name: str) -> dict[str, int]:
    """What a table says: how many sets of a function are played, by `tests/x/test_y.py::test_z`."""
    text = table_of(name).read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {words[1]: int(words[0]) for words in lines if words}


def read_table(name: str) -> dict[str, int]:
    """What holds for a run: `fast` leaves out what `short` does, and more."""
    return lines_of("short") if name == "short" else lines_of("short") | lines_of(name)


def evenly(items: list[T], count: int) -> list[T]:
    """So many of these, at equal distances, the first among them."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def chosen(names: Iterable[str], table: dict[str, int]) -> set[str]:
    """Of the tests with these names (as pytest's node ids) those that a short run plays."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    return {name for function, sets in functions.items() for name in evenly(sets, table.get(function, len(sets)))}


def measured(junit: Path) -> dict[str, list[float]]:
    """Seconds of each set, by function."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        path = str(case.get("classname")).replace(".", "/")
        found[f"{path}.py::{str(case.get('name')).partition('[')[0]}"].append(float(str(case.get("time"))))
    return dict(found)


def made(times: dict[str, list[float]], budget: Budget) -> dict[str, int]:
    table = {}
    for function, seconds in times.items():
        each = sum(seconds) / len(seconds)
        if sum(seconds) > budget.seconds:
            count = int(budget.seconds / each) if each <= budget.seconds else int(each <= budget.most_seconds)
            if count < len(seconds):
                table[function] = count
    return table


def main(name: str, junit: str) -> None:
    path = table_of(name)
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = {line.split()[1]: line for line in lines if line.endswith(BY_HAND)}
    table = made(measured(Path(junit)), BUDGETS[name])
    written = {function: f"{count} {function}" for function, count in table.items()} | kept
    head = [line for line in lines if line.startswith("#")]
    path.write_text("\n".join([*head, *(written[name] for name in sorted(written))]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
