"""scripts/mutate: which faults it can put into a module, and which tests it tries each with."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from scripts.mutation.__main__ import EQUIVALENT, FOLDERS, ROOT, draw, equivalents, modules, name_of
from scripts.mutation.faults import SmallFault, faults_of
from scripts.mutation.reach import Reach

MODULE = '''"""A module with an é in it."""
LIMIT = 3


def found(items: list[int] = [7], name: "str" = "") -> int:
    log.info("not this", number=5)
    assert len(items) > 1
    for item in items:
        if not item and name == "é" or item < LIMIT:
            continue
        items.append(item)
    if not items:
        raise ValueError(f"{1 + 2} items")
    return items[-1] + 1
'''


def faults(text: str, tmp_path: Path) -> list[SmallFault]:
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    return faults_of("module.py", tmp_path)


def test_each_fault_changes_what_runs_and_stays_python(tmp_path: Path) -> None:
    found = faults(MODULE, tmp_path)
    changed = {(fault.before, fault.after) for fault in found}
    assert ("3", "4") in changed and ("7", "8") in changed and ("continue", "break") in changed
    assert ("item < LIMIT", "(item <= LIMIT)") in changed and ('name == "é"', "(name != 'é')") in changed
    assert ("items.append(item)", "pass") in changed and ("return items[-1] + 1", "return None") in changed
    assert ("not items", "(items)") in changed or ("not items", "items") in {(b, a.strip("()")) for b, a in changed}
    assert not [fault for fault in found if "log" in fault.before or fault.before in ("5", "len(items) > 1", "1 + 2")]
    for fault in found:
        text = fault.apply(MODULE)
        assert text != MODULE
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(MODULE)), fault


def test_a_fault_is_known_by_more_than_its_line(tmp_path: Path) -> None:
    (fault,) = faults("LIMIT = 3\n", tmp_path)
    (moved,) = faults("\n\nLIMIT = 3\n", tmp_path)
    assert str(fault) != str(moved) and name_of(fault) == name_of(moved) == ("module.py", "LIMIT = 3", "3", "4")


def test_what_is_named_equivalent_is_a_fault_that_there_is() -> None:
    """An entry goes with the code that it speaks of, and says why nothing can be seen of it."""
    possible = {name_of(fault) for folder in FOLDERS for path in modules(folder) for fault in faults_of(path, ROOT)}
    assert equivalents() <= possible, equivalents() - possible
    assert all(len(entry["reason"]) > 10 for entry in json.loads(EQUIVALENT.read_text(encoding="utf-8")))


def test_what_a_class_is_made_of_and_what_is_asserted_is_left_out(tmp_path: Path) -> None:
    text = "class A(B, frozen=True, slots=True):\n    x = 1\n"
    text += "for a, b in zip(c, d, strict=True):\n    request_logger(l, h).info('x', n=2)\n"
    assert [(fault.before, fault.after) for fault in faults(text, tmp_path)] == [("1", "2")]


def test_the_tests_of_a_module_s_own_file_come_first() -> None:
    own, other = "tests/unit/test_a.py::test_x", "tests/unit/test_ba.py::test_y"
    reach = Reach(seconds={own: 5.0, other: 0.1})
    reach.tests["services/a.py", 1] |= {own, other}
    reach.tests["services/b.py", 1] |= {own, other}
    assert reach.of("services/a.py", 1) == [own, other] and reach.of("services/b.py", 1) == [other, own]


def test_the_quickest_test_comes_first_and_an_import_is_tried_with_its_module_s() -> None:
    reach = Reach(seconds={"slow": 5.0, "quick": 0.1}, imported={"a.py": {1}})
    reach.tests["a.py", 2] |= {"slow", "quick"}
    assert reach.of("a.py", 2) == ["quick", "slow"] == reach.of("a.py", 1)
    reach.imported["data.py"] = {7}
    assert reach.of("data.py", 7) == ["quick", "slow"] and reach.of("data.py", 8) == []
    assert reach.of("a.py", 3) == [] == reach.of("b.py", 1)


def test_faults_are_drawn_in_proportion_and_again_alike() -> None:
    drawn = draw(None, 60, seed=5)
    assert drawn == draw(None, 60, seed=5) != draw(None, 60, seed=6)
    assert set(drawn) == set(FOLDERS) and all(drawn.values())
    assert len(drawn["services/scheduler"]) > len(drawn["services/detokenizer"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_and_their_tests_exist(folder: str) -> None:
    assert modules(folder)
    assert all((ROOT / tests).exists() for tests in FOLDERS[folder])
