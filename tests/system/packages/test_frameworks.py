"""The examples of frameworks, by the packages themselves, against a served bundled model.

PAGEANT_FRAMEWORKS names a folder with an environment for each; scripts/prove_frameworks makes one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import ROOT, Troupe, troupe

FRAMEWORKS = os.environ.get("PAGEANT_FRAMEWORKS", "")
EXAMPLES = {  # by framework: the program, and words of what it prints
    "langchain": ("langchain_tool", ("weather ", "has sun.")),
    "llama_index": ("llama_index_chat", ("Once upon a time",)),
    "litellm": ("litellm_both", ("openai Once upon a time", "anthropic Once upon a time")),
    "instructor": ("instructor_class", ("fox", "owl", "bear")),
    "pydantic_ai": ("pydantic_ai_agent", ("fox", "owl", "bear")),
}
ONE_OF = {"instructor", "pydantic_ai"}  # print one of the words
TIMEOUT = 180.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-threads", "1", "--num-blocks", "512", "--tool-call-parser", "hermes"]
    with troupe(tmp_path_factory.mktemp("frameworks"), *options) as served:
        yield served


@pytest.mark.parametrize("framework", EXAMPLES)
def test_a_framework_s_example_runs(framework: str, request: pytest.FixtureRequest) -> None:
    python = Path(FRAMEWORKS) / framework / "bin" / "python"
    if not FRAMEWORKS or not python.exists():
        pytest.skip(f"needs {framework} (PAGEANT_FRAMEWORKS, scripts/prove_frameworks)")
    running: Troupe = request.getfixturevalue("running")
    name, words = EXAMPLES[framework]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(python), "-m", f"examples.{name}", running.url], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=TIMEOUT, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [word in done.stdout for word in words]
    assert any(found) if framework in ONE_OF else all(found), done.stdout
