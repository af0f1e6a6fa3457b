"""A terminal shows warnings alone unless a level is asked for; a pipe gets every line."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

LOGS = """
import sys, structlog
from shared.processes.logging import recent_events, setup_logging
setup_logging("worker", "worker-1", level=sys.argv[1], format=sys.argv[2])
log = structlog.get_logger()
log.info("quiet_event")
log.warning("loud_event")
assert [event["event"] for event in recent_events()] == ["quiet_event", "loud_event"], "an incident has all of them"
"""


def on_terminal(level: str, format: str) -> str:
    main_end, child_end = pty.openpty()
    subprocess.run([sys.executable, "-c", LOGS, level, format], stderr=child_end, check=True)
    os.write(child_end, b"end")
    said = b""
    while not said.endswith(b"end"):
        said += os.read(main_end, 4096)
    os.close(main_end)
    os.close(child_end)
    return said.decode()


@pytest.mark.parametrize(("level", "format", "shown"), [
    ("auto", "auto", False), ("info", "auto", True), ("auto", "console", False), ("auto", "json", True),
])  # fmt: skip
def test_on_a_terminal(level: str, format: str, shown: bool) -> None:
    said = on_terminal(level, format)
    assert "loud_event" in said and ("quiet_event" in said) is shown


@pytest.mark.parametrize("format", ["auto", "console"])
def test_in_a_pipe(format: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOGS, "auto", format], stderr=subprocess.PIPE, check=True, text=True)
    assert "quiet_event" in done.stderr and "loud_event" in done.stderr
