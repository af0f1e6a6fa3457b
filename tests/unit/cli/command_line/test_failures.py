"""What a command ends with: one line, and a status that tells."""

from __future__ import annotations

import click
import pytest

from services.cli.command_line.failures import end
from shared.errors import ConfigError, FatalError, ModelError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("port is bad"), 78, "pageant: port is bad"),
        (ModelError("no\n\nweights"), 78, "pageant: no weights"),
        (FatalError("gone"), 1, "pageant: gone"),
        (PermissionError(13, "Permission denied", "/x"), 1, "pageant: /x: Permission denied"),
        (OSError("odd"), 1, "pageant: odd"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (click.ClickException("wrong"), 1, "Error: wrong"),
        (ValueError("a\nb"), 70, "pageant: a defect: ValueError: a b (python -X dev -m services.cli ... shows where)"),
    ],
)
def test_an_error_is_one_line(error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(error) == status
    assert capsys.readouterr().err == (f"{line}\n" if line else "")
