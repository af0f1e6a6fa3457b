"""The lines of a batch's input: what is wrong with them, and reading them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.batches.lines import MAX_ERRORS, read_lines
from services.gateway.http.batches.objects import BatchError

ENDPOINT = "/v1/completions"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    values = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}} | changes
    return json.dumps({name: value for name, value in values.items() if value is not None}).encode()


def read(tmp_path: Path, *lines: bytes, max_lines: int = 100, max_bytes: int = 1000) -> tuple[Any, list[BatchError]]:
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(lines))
    return read_lines(path, ENDPOINT, max_lines=max_lines, max_bytes=max_bytes)


def test_lines_are_found_again(tmp_path: Path) -> None:
    lines, errors = read(tmp_path, line("a"), b"", line("ä"), b"  \r", line("c", body={"prompt": "y"}) + b"\r")
    assert not errors and len(lines) == 3
    assert [lines.read(index).custom_id for index in (2, 0, 1)] == ["c", "a", "ä"]
    assert json.loads(bytes(lines.read(2).body)) == {"prompt": "y"}
    lines.close()


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[1]", "invalid_request", None),
        (line(None), "invalid_request", None),
        (line(7), "invalid_request", None),
        (line("b", body=None), "invalid_request", None),
        (line("b", body=[1]), "invalid_request", None),
        (line("b", body={"stream": True}), "invalid_request", "body.stream"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("b" * 600), "invalid_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/chat/completions"), "invalid_url", "url"),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b", body={"prompt": "x" * 1000}), "line_too_long", None),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, wrong: bytes, code: str, param: str | None) -> None:
    lines, errors = read(tmp_path, line("a"), b"", wrong)
    assert [(error.code, error.line, error.param) for error in errors] == [(code, 3, param)]
    assert errors[0].message.startswith("line 3: ")
    lines.close()


def test_numbers_are_bounded(tmp_path: Path) -> None:
    lines, errors = read(tmp_path, *(line(str(index)) for index in range(4)), max_lines=3)
    assert [(error.code, error.line) for error in errors] == [("too_many_tasks", 4)]
    lines.close()
    lines, errors = read(tmp_path, *[b"{"] * (MAX_ERRORS + 50), max_lines=1000)
    assert len(errors) == MAX_ERRORS
    lines.close()
    lines, errors = read(tmp_path, b"", b"")
    assert [error.code for error in errors] == ["empty_file"]
    lines.close()
