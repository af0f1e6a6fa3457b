"""A local troupe of real processes, with a stand-in for a worker or a real one, and what /proc says of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.tokens import MODEL
from services.cli.client import TerminalClient
from services.cli.processes import last_words, start
from services.cli.serve import with_port
from shared.config import Settings, settings_environment
from shared.proc import PROC, own_seconds, stat

SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer")
READY_SECONDS = 30
STOP_SECONDS = 10
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessUsage:
    """Of one process so far: processor seconds of user and system together, and resident bytes now."""

    seconds: float
    resident: int


def usage(pid: int) -> ProcessUsage:
    """Raises OSError where the process is gone."""
    pages = int((PROC / str(pid) / "statm").read_text(encoding="utf-8").split()[1])
    fields = stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return ProcessUsage(own_seconds(fields), pages * PAGE)


class LocalDeployment:
    """The processes by name."""

    def __init__(self, settings: Settings, processes: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
        self.settings = settings
        self.address = f"127.0.0.1:{settings.gateway.port}"
        self.processes = processes
        self._logs = logs

    def usages(self) -> dict[str, ProcessUsage]:
        self.check()
        return {name: usage(process.pid) for name, process in self.processes.items()}

    def check(self) -> None:
        """Raise RuntimeError with its last words where one has died."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with status {process.returncode}: {last_words(self.log_of(name))}")

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def troupe(
    step_ms: float, *, modules: Mapping[str, Sequence[str]] | None = None, **settings: object
) -> AbstractContextManager[LocalDeployment]:
    """Serves the bundled model's tokenizer over gRPC until the block ends; the worker is a stand-in."""
    worker = ["-m", "scripts.bench.standin", "--step-ms", str(step_ms)]
    return troupe_with(worker, modules=modules, ready_seconds=READY_SECONDS, **settings)


@contextmanager
def troupe_with(
    worker: Sequence[str],
    *,
    modules: Mapping[str, Sequence[str]] | None = None,
    ready_seconds: float = READY_SECONDS,
    **settings: object,
) -> Iterator[LocalDeployment]:
    """Serves until the block ends, with a worker that Python starts with these arguments; leaves no process behind.

    `modules`: by service, what `python -m` is to run in its place, or beside the others.
    """
    with tempfile.TemporaryDirectory(prefix="pageant-bench-") as directory:
        own = {"model": str(MODEL), "port": 0, "http_port": -1, "runtime_dir": f"{directory}/run", "log_format": "json"}
        chosen = with_port(Settings.of(**own | settings))
        environment = os.environ | settings_environment(chosen)
        commands = {name: [sys.executable, "-m", f"services.{name}"] for name in SERVICES}
        commands["worker"] = [sys.executable, *worker]
        commands |= {name: [sys.executable, "-m", *words] for name, words in (modules or {}).items()}
        logs = Path(directory)
        running = LocalDeployment(chosen, {}, logs)
        try:
            for name, command in commands.items():
                running.processes[name] = start(command, environment, running.log_of(name))
            wait_until_serving(running, ready_seconds)
            yield running
        finally:
            stop(running.processes.values())


def wait_until_serving(running: LocalDeployment, seconds: float = READY_SECONDS) -> None:
    client, deadline = TerminalClient(running.address), time.monotonic() + seconds
    try:
        while not client.serving:
            running.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the troupe does not serve within {seconds:.0f} s")
            time.sleep(0.05)
    finally:
        client.close()


def stop(children: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask all, then kill who stays."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
