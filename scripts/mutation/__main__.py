"""Draws small faults at random, tries each with the tests that reach its line, and says which were not noticed.

A fault is noticed when a test fails or does not end.  It is put into a copy of the sources, never into the checkout.
Faults that change nothing that can be seen are named in `equivalent.json`, with the reason, and count as neither.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue

from scripts.bench.common.report import Result, finish
from scripts.mutation.faults import SmallFault, faults_of, one_line
from scripts.mutation.forks import MutantForks
from scripts.mutation.reach import Reach, measure

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "services/scheduler": ["tests/unit/scheduler"],
    "engine/execution": [
        "tests/engine/execution", "tests/engine/modeling", "tests/unit/worker", "tests/engine/lora/test_queued.py",
        "tests/engine/heads/test_heads.py",
    ],
    "services/detokenizer": ["tests/unit/detokenizer"],
    "services/gateway/streams": ["tests/unit/gateway/streams", "tests/unit/gateway/generation"],
}  # fmt: skip
SHARE = 0.9  # of the faults must be noticed
PATIENCE = 20.0  # seconds beyond four times what the tests took, after which they count as hanging
BUDGET = 60.0  # seconds of tests for a fault at most, the quickest first
EQUIVALENT = Path(__file__).with_name("equivalent.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="in all folders together, by their size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", choices=sorted(FOLDERS), help="only this one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="exit 1 where fewer than 90 %% of a folder's are noticed")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="only this part of them: where a run must be short"
    )
    parser.add_argument("--scratch", type=Path, help="keep the copies, and which test runs what, in this folder")
    args = parser.parse_args()
    drawn = draw(args.folder, args.faults, args.seed)
    part, parts = map(int, args.part.split("/"))
    known = equivalents()
    lines: list[Result] = []
    with nullcontext(args.scratch) if args.scratch else tempfile.TemporaryDirectory() as scratch:
        for folder, faults in drawn.items():
            faults = [fault for fault in faults if name_of(fault) not in known][part - 1 :: parts]
            noticed = len(faults) - len(list(try_all(folder, faults, Path(scratch), args.jobs)))
            note, share = f"{noticed} of {len(faults)}", noticed / max(1, len(faults))
            lines.append(Result(f"{folder}: faults noticed", share, "", at_least=SHARE, note=note))
    return finish(lines, check=args.check)


Name = tuple[str, str, str, str]


def name_of(fault: SmallFault) -> Name:
    """What a fault is known by when lines above it move."""
    return fault.path, fault.code, one_line(fault.before), one_line(fault.after)


def equivalents() -> set[Name]:
    """The faults that change nothing that can be seen."""
    entries = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {(entry["file"], entry["line"], entry["before"], entry["after"]) for entry in entries}


def draw(folder: str | None, count: int, seed: int) -> dict[str, list[SmallFault]]:
    """The faults of each folder, in proportion to how many it can have."""
    chance = random.Random(seed)
    possible = {
        name: [fault for path in modules(name) for fault in faults_of(path, ROOT)]
        for name in FOLDERS if folder in (None, name)
    }  # fmt: skip
    total = sum(map(len, possible.values()))
    return {
        name: chance.sample(all_of, min(len(all_of), max(1, count * len(all_of) // total)))
        for name, all_of in possible.items()
    }


def modules(folder: str) -> list[str]:
    """Without `__main__.py`, which only begins a process: unit tests begin none."""
    found = (path for path in (ROOT / folder).rglob("*.py") if path.name != "__main__.py")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def try_all(folder: str, faults: list[SmallFault], scratch: Path, jobs: int) -> Iterator[SmallFault]:
    """The faults that no test notices, each printed as it is found."""
    begin = time.monotonic()
    name = folder.replace("/", "-")
    first = copied(scratch / f"{name}-0")
    reach = measure(first, folder, FOLDERS[folder], scratch, jobs)
    places: SimpleQueue[tuple[Path, MutantForks]] = SimpleQueue()
    for job in range(jobs):
        place = scratch / f"{name}-{job}"
        if not place.exists():
            shutil.copytree(first, place, symlinks=True)  # with what was compiled
        forks = MutantForks(place)
        if forks.run([min(reach.seconds, key=reach.seconds.__getitem__)], PATIENCE):
            raise RuntimeError(f"a test fails in {place} without a fault")
        places.put((place, forks))
    print(f"{folder}: {len(faults)} faults, {len(reach.seconds)} tests, measured in {time.monotonic() - begin:.0f} s")

    def survives(fault: SmallFault) -> bool:
        place, forks = places.get()
        try:
            return not is_noticed(fault, place, forks, reach)
        finally:
            places.put((place, forks))

    with ThreadPoolExecutor(jobs) as pool:
        for fault, survived in zip(faults, pool.map(survives, faults), strict=True):
            if survived:
                reason = "" if reach.of(fault.path, fault.line) else "  (no test runs this line)"
                print(f"  survived: {fault}{reason}", flush=True)
                yield fault
    for _ in range(jobs):
        places.get()[1].close()


def copied(place: Path) -> Path:
    """A copy of the tracked files, with the environment that this process runs in; one that is there already stays."""
    if place.exists():
        return place
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    (place / ".venv").symlink_to(Path(sys.prefix))
    return place


def is_noticed(fault: SmallFault, place: Path, forks: MutantForks, reach: Reach) -> bool:
    tests: list[str] = []
    spent = 0.0
    for test in reach.of(fault.path, fault.line):
        spent += reach.seconds.get(test, 1.0)
        if tests and spent > BUDGET:
            break
        tests.append(test)
    if not tests:
        return False
    with put_in(fault, place):
        return forks.run(tests, 4 * spent + PATIENCE) != 0


@contextmanager
def put_in(fault: SmallFault, place: Path) -> Iterator[None]:
    path = place / fault.path
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.apply(text), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
