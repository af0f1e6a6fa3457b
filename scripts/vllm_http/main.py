"""Runs the files and prints what became of their tests: passed, failed, and by name those with a reason to fail."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from scripts.vllm_http.checkpoint import make_all
from scripts.vllm_http.reasons import FILES, is_http, reason_of
from scripts.vllm_http.server import MODEL, OUTCOMES, SOURCE

TREE = Path(__file__).parents[2]
TEST_SECONDS = 300
OPERATION = re.compile(r"\[[A-Z]+ /.*\]$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only files whose path has one of these in it")
    parser.add_argument("-k", default="", help="only tests whose name matches, as pytest has it")
    parser.add_argument("--outcomes", type=Path, help="keep outcomes in this file, and add to what is there")
    arguments = parser.parse_args()
    files = [file for file in FILES if not arguments.words or any(word in file for word in arguments.words)]
    with tempfile.TemporaryDirectory(prefix="pageant-vllm-") as directory:
        kept = arguments.outcomes or Path(directory) / "outcomes.json"
        if MODEL not in os.environ:
            os.environ |= make_all(Path(directory))
        run(files, kept.absolute(), arguments.k)
        sys.exit(report(json.loads(kept.read_text()) if kept.exists() else {}))


def run(files: list[str], outcomes: Path, names: str) -> None:
    """One pytest over the files; outcomes come through the plugin."""
    source = Path(os.environ[SOURCE])
    environment = os.environ | {OUTCOMES: str(outcomes), "PYTHONPATH": str(TREE)}
    words = [
        sys.executable, "-m", "pytest", "-q", "-p", "scripts.vllm_http.plugin", "-p", "no:cacheprovider",
        "--confcutdir", str(source / "tests/entrypoints"), "--rootdir", str(source), "-c", os.devnull,
        "-o", "asyncio_mode=auto", "--timeout", str(TEST_SECONDS), "--tb=short", "--continue-on-collection-errors",
        *(["-k", names] if names else []), *[f"tests/entrypoints/{file}" for file in files],
    ]  # fmt: skip
    subprocess.run(words, cwd=source, env=environment, check=False)


def whole(outcomes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """A test that schemathesis runs once for each operation counts once, and passes where all do."""
    found: dict[str, dict[str, str]] = {}
    for name, one in outcomes.items():
        test = OPERATION.sub("", name)
        if test not in found or found[test]["outcome"] == "passed":
            found[test] = one
    return found


def report(outcomes: dict[str, dict[str, str]]) -> int:
    """Prints it; 1 where a test fails that has no reason to."""
    counts: Counter[str] = Counter()
    unexplained = []
    for name, one in sorted(whole(outcomes).items()):
        short = name.removeprefix("tests/entrypoints/")
        if not is_http(short) or one["outcome"] == "skipped":
            continue
        reason = reason_of(short)
        outcome = "passed" if one["outcome"] == "passed" else reason or "failed"
        counts[outcome] += 1
        if one["outcome"] != "passed" and reason is None:
            unexplained.append(f"{short}: {one['outcome']}: {one['reason']}")
    print(f"{counts['passed']} of {sum(counts.values())} of vLLM's HTTP tests pass.")
    for reason, count in sorted(counts.items()):
        if reason not in ("passed", "failed"):
            print(f"{count:4} not: {reason}")
    for line in unexplained:
        print(f"     failed: {line}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    main()
