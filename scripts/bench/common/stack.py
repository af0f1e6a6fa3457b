"""The deployment in containers: `docker compose` as a user calls it, in a project of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer", "draft")
OTHERS_SETTINGS = ("PAGEANT_", "COMPOSE_")
CLEAR_LINE = "\x1b[2K"  # compose writes it between its lines, terminal or not
BUILD_SECONDS = 1500  # the first build fetches torch


class DockerError(RuntimeError):
    """A command failed with `status`; its words say why."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.status = status


def lack() -> str:
    """What is missing here for containers; empty where nothing is."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command, reason in ((["compose", "version"], "docker has no compose"), (["info"], "no Docker engine answers")):
        if subprocess.run(["docker", *command], capture_output=True, timeout=60).returncode:
            return reason
    return ""


class Stack:
    """One compose project, with its gateways behind a port of its own."""

    def __init__(
        self, project: str, port: int, directory: Path, *, draft: str = "", profile: str = "", **settings: object
    ) -> None:
        """`settings`, by their names, reach every service through a file in `directory`."""
        self.address = f"127.0.0.1:{port}"
        self.project = project
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS_SETTINGS)}
        self.environment = kept | {
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_ANSI": "never",
            "PAGEANT_PORT": str(port),
            "PAGEANT_HTTP_PORT": "0",
            **({"PAGEANT_DRAFT": draft} if draft else {}),
            **({"COMPOSE_PROFILES": profile} if profile else {}),
        }
        files = (str(ROOT / "compose.yaml"), str(write_settings(directory, settings)))
        self.environment["COMPOSE_FILE"] = os.pathsep.join(files)

    def compose(self, *arguments: str, timeout: float = 180) -> str:
        """What the command prints.  Raises DockerError."""
        return self.docker("compose", *arguments, timeout=timeout)

    def docker(self, *arguments: str, timeout: float = 60) -> str:
        done = subprocess.run(
            ["docker", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            words = f"docker {' '.join(arguments)}:\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
            raise DockerError(words, done.returncode)
        return done.stdout

    def build(self) -> None:
        self.compose("build", timeout=BUILD_SECONDS)

    def up(self, **replicas: int) -> None:
        """Started, all healthy, with this many of a service."""
        scale = [f"--scale={service}={number}" for service, number in replicas.items()]
        try:
            self.compose("up", "--wait", *scale, timeout=300)
        except DockerError as error:
            last = self.compose("logs", "--no-color", "--tail", "5").replace(CLEAR_LINE, "")
            raise DockerError(f"{error}\nthe last lines of each:\n{last}", error.status) from error

    def down(self) -> None:
        """All gone, with its keys."""
        self.compose("down", "--volumes", "--remove-orphans")

    def run_in(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command).strip()

    def containers(self, service: str = "", *, all: bool = True) -> list[dict[str, Any]]:
        """As `docker compose ps` describes them, in the order of their names."""
        chosen = [*(["--all"] if all else []), *([service] if service else [])]
        lines = self.compose("ps", "--format", "json", *chosen).splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda one: str(one["Name"]))

    def inspect(self, container: str, template: str) -> str:
        return self.docker("inspect", "--format", template, container).strip()

    def logs(self, *services: str) -> list[dict[str, Any]]:
        """Every line of every container that is there; each must be one JSON object."""
        printed = self.compose("logs", "--no-color", "--no-log-prefix", *services).replace(CLEAR_LINE, "")
        return [json.loads(line) for line in printed.splitlines() if line]


def write_settings(directory: Path, settings: dict[str, object]) -> Path:
    """A compose file that adds settings to the environment of every service; YAML reads JSON."""
    environment = {f"PAGEANT_{name.upper()}": str(value) for name, value in settings.items()}
    path = directory / "settings.yaml"
    path.write_text(json.dumps({"services": {service: {"environment": environment} for service in SERVICES}}))
    return path
