"""The wall clock may be set at any time, so nothing is timed by it: the places that read it are these, and why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BREAKDOWN = "breakdowns of latency compare what processes of several hosts say"
SHOWN = "people read it"
REASONS = {
    "services/gateway/streams/latency.py": BREAKDOWN,
    "services/gateway/generation/service.py": BREAKDOWN,
    "services/gateway/http/answers/answer.py": "OpenAI's `created`, and vLLM's of poolings and scores",
    "services/gateway/http/responses/answer.py": "OpenAI's `created_at` and `completed_at`",
    "services/gateway/http/responses/store.py": "files are older than a limit, whatever process wrote them",
    "services/gateway/http/batches/store.py": "files are older than a limit, whatever process wrote them",
    "services/gateway/http/files/store.py": "OpenAI's `created_at` and `expires_at`, which outlive processes",
    "services/gateway/http/operations.py": "OpenAI's `created`",
    "services/gateway/http/requests/reading.py": "the arrival of a request, as the latency breakdown has it",
    "services/gateway/streams/report.py": BREAKDOWN,
    "services/gateway/grpc/servicer.py": "the arrival of a request, as the latency breakdown has it",
    "services/detokenizer/actor.py": BREAKDOWN,
    "services/tokenizer/actor.py": BREAKDOWN,
    "services/tokenizer/confined/renderers.py": "a template may ask for the date",
    "shared/actor/actor.py": BREAKDOWN,
    "shared/actor/incident.py": SHOWN,
    "shared/clocks/clock.py": "what the steady clock begins at",
}
WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}


def reads_wall_clock(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr in WALL:
                return True
            if node.value.id in {"datetime", "date"} and node.attr in WALL:
                return True
        if isinstance(node, ast.ImportFrom) and node.module == "time" and WALL & {alias.name for alias in node.names}:
            return True
    return False


@pytest.mark.parametrize(
    "code", ["import time\ntime.time()", "from time import time_ns", "import datetime\ndatetime.now()"]
)
def test_a_reader_is_seen(code: str) -> None:
    assert reads_wall_clock(ast.parse(code))


def test_only_these_read_the_wall_clock() -> None:
    """Services and what they share; commands for people and benches are not among them."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("services", "engine", "shared", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if "services/cli" not in str(path) and reads_wall_clock(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(REASONS)
