"""The benches' table: what is aligned, what counts as missed."""

from __future__ import annotations

import pytest

from scripts.bench.common.report import Result, figure, finish, table


@pytest.mark.parametrize(
    ("line", "missed"),
    [
        (Result("a", 3.0, "ms", at_most=3.0), False),
        (Result("a", 3.1, "ms", at_most=3.0), True),
        (Result("a", 0.99, "x", at_least=1.0), True),
        (Result("a", None, at_least=1.0), True),
        (Result("a", None), False),
        (Result("a", 5.0, at_least=1.0, at_most=4.0), True),
    ],
)
def test_what_misses_a_target(line: Result, missed: bool) -> None:
    assert line.missed is missed
    assert finish([Result("fine", 1.0), line], check=True) == int(missed)
    assert finish([line], check=False) == 0


def test_columns_are_aligned() -> None:
    lines = [
        Result("short", 1.5, "us", at_most=300.0),
        Result("a longer name", 21_400, "tokens/s", at_least=20_000),
    ]
    rows = table(lines).splitlines()
    assert rows[2].index("us") + 2 == rows[3].index("tokens/s") + 8
    assert rows[2].endswith("met") and rows[3].endswith(">= 20,000  met")


def test_figures_have_three_digits() -> None:
    assert [figure(value) for value in (0, 0.1234, 1.234, 12.34, 1234.5)] == ["0", "0.123", "1.23", "12.3", "1,234"]
