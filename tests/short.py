"""Which tests a short run plays: `scripts/test`, where `scripts/test all` plays every one.

tests/short.txt says of each function that takes long how many of its parameter sets are played; all others are played
whole.  The sets are spread evenly over those that there are, so the first one is always among them.

    python -m tests.short JUNIT.xml     write the table anew from the times of a whole run (pytest --junitxml=JUNIT.xml)

Lines that end with `by hand` stay as they are.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

TABLE = Path(__file__).with_suffix(".txt")
BY_HAND = "by hand"
SECONDS = 2.5  # of a function's sets together
MOST_SECONDS = 5.0  # of the one set of a function whose sets take longer than that each

T = TypeVar("T")


def read_table(path: Path = TABLE) -> dict[str, int]:
    """How many sets of a function are played, by `tests/x/test_y.py::test_z`."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {words[1]: int(words[0]) for words in lines if words}


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


def made(times: dict[str, list[float]]) -> dict[str, int]:
    table = {}
    for function, seconds in times.items():
        each = sum(seconds) / len(seconds)
        if sum(seconds) > SECONDS:
            count = int(SECONDS / each) if each <= SECONDS else int(each <= MOST_SECONDS)
            if count < len(seconds):
                table[function] = count
    return table


def main(junit: str) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    kept = {line.split()[1]: line for line in lines if line.endswith(BY_HAND)}
    written = {function: f"{count} {function}" for function, count in made(measured(Path(junit))).items()} | kept
    head = [line for line in lines if line.startswith("#")]
    TABLE.write_text("\n".join([*head, *(written[name] for name in sorted(written))]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
