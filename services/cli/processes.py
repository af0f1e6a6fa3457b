"""Real child processes for the supervisor, and what they said last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.cli.supervisor import Role
from shared.config import Settings, settings_environment

LAUNCH = Path(__file__).with_name("launch.py")
TAIL_LINES = 8


class Starter:
    """Starts services with these settings; logs go to standard error, or to a file each."""

    def __init__(self, settings: Settings, log_dir: Path | None = None) -> None:
        self._environment = os.environ | settings_environment(settings)
        self._log_dir = log_dir
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)

    def __call__(self, role: Role) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-m", f"services.{role.service}"], self._environment, self.log_file(role))

    def log_file(self, role: Role) -> Path | None:
        return self._log_dir / f"{role.name}.log" if self._log_dir is not None else None

    def last_words(self, role: Role) -> str:
        """Why a service died, as far as its log file tells."""
        path = self.log_file(role)
        return last_words(path) if path is not None else "its last lines above say why"


def start(command: list[str], environment: dict[str, str], log_file: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a program that cannot outlive this one.  It has its own session, so that Ctrl-C reaches only us."""
    command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *command]
    if log_file is None:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def last_words(path: Path) -> str:
    """The error of a log's last `fatal` line, or its last lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return str(error)
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "fatal":
            return str(entry.get("error"))
    return "\n".join(lines[-TAIL_LINES:])
