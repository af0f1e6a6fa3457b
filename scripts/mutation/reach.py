"""Which tests run which lines, measured once: a fault is tried with the tests that reach it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

CHECKOUT = Path(__file__).resolve().parents[2]
OPTIONS = ("-q", "-p", "no:cacheprovider", "--no-header")


@dataclass
class Reach:
    """Tests by line of a file, and how long each took, in seconds."""

    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)
    imported: dict[str, set[int]] = field(default_factory=dict)  # lines of each file that no test runs, but the import

    def of(self, path: str, line: int) -> list[str]:
        """The tests that run a line, those of its module's own file first, and the quickest first; of a line that only
        the import runs, those of its module, and all where no test runs a line of that: it has only data."""
        found = self.tests.get((path, line), set())
        if line in self.imported.get(path, ()):
            found = set().union(*(tests for (file, _), tests in self.tests.items() if file == path))
            found = found or set(self.seconds)
        own = f"/test_{Path(path).name}::"
        return sorted(found, key=lambda test: (own not in test, self.seconds.get(test, 1.0)))


def measure(root: Path, folder: str, tests: list[str], scratch: Path, jobs: int) -> Reach:
    """Run a folder's tests once; what they compile stays for the runs with faults.  What was measured in this scratch
    folder before is taken from there.  Raises RuntimeError where a test fails."""
    name = folder.replace("/", "-")
    data, report = scratch / f"{name}.coverage", scratch / f"{name}.xml"
    if not report.exists():
        _run(root, folder, tests, data, report, jobs)
    return _read(root, data, report)


def _run(root: Path, folder: str, tests: list[str], data: Path, report: Path, jobs: int) -> None:
    begun = report.with_suffix(".part")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-n", str(jobs), "--dist", "loadfile", f"--cov={folder}",
         "--cov-context=test", "--cov-report=", f"--junitxml={begun}", *tests],
        cwd=root, env=environment(root) | {"COVERAGE_FILE": str(data), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the tests fail before any fault:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    begun.rename(report)


def _read(root: Path, data: Path, report: Path) -> Reach:
    found = Reach()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        found.seconds[f"{file}.py::{case.get('name')}"] = float(case.get("time", 1.0))
    covered = CoverageData(str(data))
    covered.read()
    for file in covered.measured_files():
        path = str(Path(file).relative_to(root))
        for line, contexts in covered.contexts_by_lineno(file).items():
            if reached := {context.partition("|")[0] for context in contexts if context}:
                found.tests[path, line] |= reached
            else:
                found.imported.setdefault(path, set()).add(line)
    return found


def environment(root: Path) -> dict[str, str]:
    """Of a run with a fault: no compiled code of a faulty file may be taken for that of the next.  With as few random
    events as in everyday work: a fault that shows after more of them shows in no other test."""
    own = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    data = str(CHECKOUT.parent / "shared/data")  # as tests in the checkout find them
    less = {"PAGEANT_TEST_EVENTS": "12000", "PAGEANT_TEST_FRAMES": "2000", "PAGEANT_TEST_DATA": data}
    return {**less, **os.environ, **own}
