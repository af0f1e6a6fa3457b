"""How outcomes of vLLM's tests are counted: scripts/vllm_http."""

from __future__ import annotations

import pytest

from scripts.vllm_http.main import report, whole

PASSED, FAILED = {"outcome": "passed", "reason": ""}, {"outcome": "failed", "reason": "AssertionError: 1"}
SCHEMA = "tests/entrypoints/openai/test_openai_schema.py::test_openapi_stateless"
OTHER = "tests/entrypoints/openai/models/test_models.py::test_check_models"


def test_a_test_of_many_operations_counts_once_and_passes_where_all_do() -> None:
    parts = {f"{SCHEMA}[POST /v1/completions]": PASSED, f"{SCHEMA}[GET /v1/files/{{file_id}}]": PASSED}
    assert whole({SCHEMA: PASSED, **parts}) == {SCHEMA: PASSED}
    assert whole({SCHEMA: PASSED, **parts, f"{SCHEMA}[GET /load]": FAILED}) == {SCHEMA: FAILED}
    assert whole({f"{OTHER}[a]": PASSED, f"{OTHER}[b]": FAILED}) == {f"{OTHER}[a]": PASSED, f"{OTHER}[b]": FAILED}


def test_a_failure_needs_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    named = "tests/entrypoints/serve/instrumentator/test_basic.py::test_show_version"
    assert report({OTHER: PASSED, named: FAILED}) == 0
    assert capsys.readouterr().out.startswith("1 of 2 of vLLM's HTTP tests pass.\n   1 not: vLLM's own version\n")
    assert report({OTHER: FAILED, named: FAILED}) == 1
    assert (
        "failed: openai/models/test_models.py::test_check_models: failed: AssertionError: 1" in capsys.readouterr().out
    )
    skipped = {"outcome": "skipped", "reason": "Skipped: "}
    assert report({OTHER: skipped, "tests/entrypoints/x.py::test_completion_request_forwards_x": FAILED}) == 0
