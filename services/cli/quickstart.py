"""`pageant quickstart`: a private troupe for one completion, gone when it is done."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from services.cli.processes import Starter
from services.cli.serve import TURN, connect, report, roles, wait_until_serving, with_port
from services.cli.supervisor import Supervisor
from shared.config import Settings

MAX_DEATHS = 2  # of one service, before it is given up


def quickstart(settings: Settings, prompt: str, sampling: dict[str, Any]) -> int:
    """Start, stream one completion with its figures, shut down; returns the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="pageant-") as directory:
        private = msgspec.structs.replace(
            settings, runtime_dir=f"{directory}/run", transport="ipc", host="127.0.0.1", port=0, http_port=-1
        )
        try:
            return _run(with_port(private), prompt, sampling, Path(directory) / "logs")
        except KeyboardInterrupt:
            return 130


def _run(settings: Settings, prompt: str, sampling: dict[str, Any], log_dir: Path) -> int:
    starter = Starter(settings, log_dir)
    supervisor = Supervisor(roles(settings), starter, report=report)
    supervisor.start()
    try:
        client = connect(settings)
        if wait_until_serving(client, supervisor, lambda: _hopeless(supervisor)):
            return _generate(client, prompt, sampling, supervisor)
        for child in supervisor.children:
            if child.num_deaths:
                report(f"{child.role.name} cannot start: {starter.last_words(child.role)}")
        return 1
    finally:
        supervisor.stop(settings.drain_timeout)


def _hopeless(supervisor: Supervisor) -> bool:
    return any(child.num_deaths > MAX_DEATHS for child in supervisor.children)


def _generate(client: Any, prompt: str, sampling: dict[str, Any], supervisor: Supervisor) -> int:
    """Stream on a thread of its own, while this one, the children's parent, looks after them."""
    from services.cli import terminal

    status = [1]

    def work() -> None:
        status[0] = terminal.generate(client, prompt, sampling)

    terminal.write(prompt if sys.stdout.isatty() else "")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        supervisor.poll()
        thread.join(TURN)
    return status[0]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
