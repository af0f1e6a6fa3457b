"""`pageant doctor` suggests keys where other machines can ask without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.checks.models import Finding
from services.cli.checks.settings import check_access
from shared.config import load_settings
from shared.exposure import KEYS_ADVICE


def check_keys(**settings: str) -> Finding:
    return next(found for found in check_access(load_settings(settings, environ={})) if found.subject == "keys")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "gateway"])
def test_keys_are_suggested_where_others_reach_the_server(host: str) -> None:
    finding = check_keys(host=host)
    assert finding.verdict == "note" and KEYS_ADVICE in finding.text and host in finding.text


@pytest.mark.parametrize(
    "safe",
    [
        {"host": "127.0.0.1"},
        {"host": "[::1]"},
        {"host": "0.0.0.0", "api_keys": "acme:correct-horse-battery"},
        {"host": "0.0.0.0", "api_keys_file": "keys"},
    ],
)
def test_and_nowhere_else(tmp_path: Path, safe: dict[str, str]) -> None:
    if "api_keys_file" in safe:
        safe = safe | {"api_keys_file": str(tmp_path / "keys")}
        (tmp_path / "keys").write_text("acme:correct-horse-battery\n")
    assert check_keys(**safe).verdict == "ok"
