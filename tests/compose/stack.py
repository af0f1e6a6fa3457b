"""The troupe in containers: `docker compose` as a user calls it, in a project of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer", "draft")
OTHERS_SETTINGS = ("PAGEANT_", "COMPOSE_")
CLEAR_LINE = "\x1b[2K"  # compose writes it between its lines, terminal or not
BUILD_SECONDS = 1500  # the first build fetches torch


def why_not() -> str:
    """What keeps these tests from running; empty where nothing does."""
    if os.environ.get("PAGEANT_TEST_COMPOSE") != "1":
        return "set PAGEANT_TEST_COMPOSE=1 to try the containers"
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command, lack in ((["compose", "version"], "docker has no compose"), (["info"], "no Docker engine answers")):
        if subprocess.run(["docker", *command], capture_output=True, timeout=60).returncode:
            return lack
    return ""


class Stack:
    """One compose project, with the gateway on a port of its own."""

    def __init__(self, project: str, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS_SETTINGS)}
        self._environment = kept | {
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_ANSI": "never",
            "PAGEANT_PORT": str(port),
            "PAGEANT_HTTP_PORT": "0",
            "PAGEANT_LOG_LEVEL": "debug",
        }

    def compose(self, *arguments: str, timeout: float = 180) -> str:
        """What the command prints; its failure fails the test with what it said."""
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, (
            f"docker compose {' '.join(arguments)}:\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
        )
        return done.stdout

    def up(self, **replicas: int) -> None:
        """Started, all healthy, with this many of a service."""
        scale = [f"--scale={service}={number}" for service, number in replicas.items()]
        self.compose("up", "--wait", *([] if scale else ["--build"]), *scale, timeout=BUILD_SECONDS)

    def run_in(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command).strip()

    def containers(self) -> list[dict[str, Any]]:
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def logs(self) -> list[dict[str, Any]]:
        """Every line of every container that is there; each must be one JSON object."""
        lines = self.compose("logs", "--no-color", "--no-log-prefix").replace(CLEAR_LINE, "").splitlines()
        return [json.loads(line) for line in lines if line]
