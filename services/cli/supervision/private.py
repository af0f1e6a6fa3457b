"""A private deployment for one piece of work, such as `pageant quickstart`; its directory is deleted afterwards."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing
from pathlib import Path
from typing import Any

from services.cli.addresses import with_port
from services.cli.checks import examine
from services.cli.command_line.failures import one_line
from services.cli.serve import TURN, connect, report, roles, wait_until_serving
from services.cli.supervision.processes import Starter, start_fork_servers
from services.cli.supervision.supervisor import Supervisor
from shared.config import Settings
from shared.processes.exit_status import EXIT_CONFIG

MAX_DEATHS = 2  # of one service, before it is given up
Work = Callable[[Settings], int]  # gets the settings with the port that is served; returns an exit status


def with_private_deployment(settings: Settings, work: Work, *, http_port: int = -1) -> int:
    """Start, work, stop; returns what the work returned, 1 where the services cannot start, 130 on Ctrl-C.

    `http_port`: 0: any free one, -1: none.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if settings.engine.executor == "ray":
        report(
            "executor is 'ray', but this command's deployment is of one host: only `pageant serve` has that executor"
        )
        return EXIT_CONFIG
    with closing(start_fork_servers()) as fork_servers, tempfile.TemporaryDirectory(prefix="pageant-") as directory:
        private = settings.replace(
            runtime_dir=f"{directory}/run", transport="ipc", host="127.0.0.1", port=0, http_port=http_port
        )
        try:
            if wrong := next((found for found in examine(private) if found.verdict == "wrong"), None):
                report(wrong.text)
                return EXIT_CONFIG
            private = with_port(private)
            return _run(private, work, Starter(private, Path(directory) / "logs", fork_servers=fork_servers))
        except KeyboardInterrupt:
            return 130


def quickstart(settings: Settings, prompt: str, sampling: dict[str, Any]) -> int:
    """Stream one completion of a private deployment, with its figures; returns the exit status."""

    def work(private: Settings) -> int:
        from services.cli.display import terminal

        terminal.write(prompt if sys.stdout.isatty() else "")
        return terminal.generate(connect(private), prompt, sampling)

    return with_private_deployment(settings, work)


def _run(settings: Settings, work: Work, starter: Starter) -> int:
    supervisor = Supervisor(roles(settings), starter, report=report)
    supervisor.start()
    client = connect(settings)

    def hopeless() -> bool:
        return any(child.num_deaths > MAX_DEATHS for child in supervisor.children)

    try:
        if wait_until_serving(client, supervisor, hopeless):
            return _work(settings, work, supervisor)
        for child in supervisor.children:
            if child.num_deaths:
                report(f"{child.role.name} cannot start: {one_line(starter.last_words(child.role))}")
        return EXIT_CONFIG if supervisor.failure else 1
    finally:
        client.close()
        supervisor.stop(settings.deployment.drain_timeout)


def _work(settings: Settings, work: Work, supervisor: Supervisor) -> int:
    """Work on a thread of its own, while this one, the children's parent, looks after them.

    What the work raises is raised here.
    """
    done = Future[int]()

    def run() -> None:
        try:
            done.set_result(work(settings))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not done.done():
        supervisor.poll()
        wait([done], TURN)
    return done.result()
