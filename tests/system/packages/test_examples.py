"""Every program of examples/ runs against a served bundled model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.system.harness import ROOT, Troupe, troupe
from tests.system.packages.test_frameworks import EXAMPLES

FOLDER = ROOT / "examples"
NEEDS_OPENAI = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
TESTED = {"stream_openai", "stream_grpc", "call_tool", "structured_output", "kill_worker", "batch"}
OF_FRAMEWORKS = {name for name, _ in EXAMPLES.values()}  # tests/system/packages/test_frameworks.py
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    directory = tmp_path_factory.mktemp("examples")
    options = ["--num-threads", "1", "--num-blocks", "512", "--tool-call-parser", "hermes"]
    with troupe(directory, *options, "--files-dir", str(directory / "files")) as served:
        yield served


def run(name: str, *arguments: str) -> str:
    """As its README says, in the root of the repository."""
    command = [sys.executable, "-m", f"examples.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here_and_in_the_index() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == TESTED | OF_FRAMEWORKS
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.py)" in index for name in TESTED | OF_FRAMEWORKS)


@NEEDS_OPENAI
def test_stream_openai(running: Troupe) -> None:
    assert len(run("stream_openai", running.url).split()) > 20


def test_stream_grpc(running: Troupe) -> None:
    said = run("stream_grpc", running.address)
    assert said.splitlines()[-1] == "FINISH_REASON_LENGTH, 60 tokens" and len(said) > 100


@NEEDS_OPENAI
def test_call_tool(running: Troupe) -> None:
    call, result = run("call_tool", running.url).splitlines()
    assert call.startswith('weather {"place": ') and result.startswith("The ")


@NEEDS_OPENAI
def test_structured_output(running: Troupe) -> None:
    animal, age, is_kind = run("structured_output", running.url).split()
    assert animal in ("fox", "owl", "bear") and 1 <= int(age) <= 30 and is_kind in ("True", "False")


@NEEDS_OPENAI
def test_batch(running: Troupe) -> None:
    results = dict(line.split(": ", 1) for line in run("batch", running.url).splitlines())
    assert set(results) == {"dragon", "rain", "cat"} and all(len(text) > 20 for text in results.values())


def test_kill_worker(running: Troupe) -> None:
    (worker,) = running.pids("worker")
    said = run("kill_worker", str(worker), running.address)
    assert "the two answers are equal" in said
    assert running.pids("worker") != [worker], "another worker has taken over"


def test_kill_worker_without_a_process_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "examples.kill_worker"], cwd=ROOT, capture_output=True,
                          text=True, timeout=TIMEOUT, check=False)  # fmt: skip
    assert done.returncode == 1 and "PID is the process" in done.stderr
