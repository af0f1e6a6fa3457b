"""The table of a short run names tests that there are, and chooses among their parameter sets evenly."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.short import BUDGETS, BY_HAND, Budget, chosen, evenly, lines_of, made, measured, read_table, table_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("table", BUDGETS)
def test_every_name_in_a_table_is_that_of_a_test(table: str) -> None:
    names: dict[str, set[str]] = {}
    for function in lines_of(table):
        path, name = function.split("::")
        if path not in names:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names[path], function


@pytest.mark.parametrize("table", BUDGETS)
def test_no_name_is_there_twice_and_what_is_chosen_by_hand_is_played(table: str) -> None:
    lines = [line for line in table_of(table).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) == len(lines_of(table)) > 100
    assert all(int(line.split()[0]) for line in lines if line.endswith(BY_HAND))


def test_parameter_sets_are_spread_evenly_and_others_are_whole() -> None:
    assert evenly(list("abcdefghij"), 3) == ["a", "d", "g"] and evenly([1, 2], 5) == [1, 2] and evenly([1], 0) == []
    names = [f"t.py::long[{number}]" for number in range(10)] + ["t.py::never", "t.py::other[a]", "t.py::other[b]"]
    played = chosen(names, {"t.py::long": 2, "t.py::never": 0})
    assert played == {"t.py::long[0]", "t.py::long[5]", "t.py::other[a]", "t.py::other[b]"}


def test_what_takes_long_is_cut_to_a_few_seconds(tmp_path: Path) -> None:
    cases = [
        ("slow[a]", 9.0),
        ("slow[b]", 9.0),
        ("fair", 4.0),
        *((f"many[{n}]", 0.5) for n in range(20)),
        ("quick", 0.1),
    ]
    lines = "".join(f'<testcase classname="tests.unit.test_x" name="{name}" time="{time}"/>' for name, time in cases)
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>", encoding="utf-8")
    table = made(measured(tmp_path / "junit.xml"), Budget(2.5, 5.0))
    assert table == {"tests/unit/test_x.py::slow": 0, "tests/unit/test_x.py::many": 5}


def test_what_the_fast_run_plays_is_part_of_what_the_short_one_plays() -> None:
    short, fast = read_table("short"), read_table("fast")
    assert all(fast[name] <= count for name, count in short.items())
