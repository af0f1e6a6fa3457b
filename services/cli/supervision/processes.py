"""Real child processes for the supervisor, and what they said last."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from services.cli.supervision.forking import ForkServers
from services.cli.supervision.supervisor import ChildProcess, Process, Role
from shared.actor.status import read_status, waits_path, words_path
from shared.config import Settings, settings_environment

LAUNCH = Path(__file__).with_name("launch.py")
RAY = "services.worker.ray"  # the program of a worker that Ray places
TAIL_LINES = 8
METRICS_PORTS = 10  # for the replicas of each service, in the order of the next line
PLACES = ("gateway", "tokenizer", "scheduler", "worker", "draft", "detokenizer", "store")


class Starter:
    """Starts services with these settings; logs go to standard error, or to a file each.

    Several gateways listen at consecutive ports.  Each port may be shared, so that a gateway's successor can listen
    there before it has left.
    """

    def __init__(
        self,
        settings: Settings,
        log_dir: Path | None = None,
        settings_for: Callable[[Role], Settings] | None = None,
        fork_servers: ForkServers | None = None,
    ) -> None:
        """`settings_for`: of each role, where they are not the same for all; `fork_servers`: what
        services are forked by, where they are."""
        self._settings_for = settings_for or (lambda _: settings)
        self._log_dir = log_dir
        self._status_dir = Path(tempfile.mkdtemp(prefix="pageant-status-"))
        weakref.finalize(self, shutil.rmtree, self._status_dir, ignore_errors=True)
        self._num_started = 0
        self._status_files = weakref.WeakKeyDictionary[Process, Path]()
        self._fork_servers = fork_servers
        self._newest: dict[Role, Path] = {}
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)

    def __call__(self, role: Role) -> Process:
        self._num_started += 1
        settings, status_file = self._settings_for(role), self._status_dir / f"{file_name(role)}.{self._num_started}"
        process = self._begin(role, settings, settings_environment(settings_of(role, settings, status_file)))
        self._status_files[process] = self._newest[role] = status_file
        return process

    def _begin(self, role: Role, settings: Settings, environment: Mapping[str, str]) -> Process:
        is_placed = role.service == "worker" and settings.engine.executor == "ray"
        program, log_file = RAY if is_placed else f"services.{role.service}", self.log_file(role)
        begin = partial(start, [sys.executable, "-m", program], os.environ | environment, log_file)
        if self._fork_servers is None:
            return begin()
        drafts = (
            program == "services.draft" and settings.speculation.has_service and settings.speculation.draft != "ngram"
        )
        has_torch = drafts or program == "services.worker"
        server = self._fork_servers.with_torch if has_torch else self._fork_servers.common
        if log_file is None:
            return server.fork(program, environment, 1, 2, begin)
        with opened(log_file) as out:
            return server.fork(program, environment, out.fileno(), out.fileno(), begin)

    def is_ready(self, child: ChildProcess) -> bool:
        """Whether a child lives and has joined the others."""
        if child.process is None or not child.alive:
            return False
        return read_status(self._status_files[child.process]) == "READY"

    def waits_for(self, child: ChildProcess) -> str:
        """What a child that is not ready waits for, as far as it says."""
        if child.process is None or not child.alive:
            return ""
        try:
            return waits_path(self._status_files[child.process]).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def log_file(self, role: Role) -> Path | None:
        return self._log_dir / f"{file_name(role)}.log" if self._log_dir is not None else None

    def last_words(self, role: Role) -> str:
        """Why a service died, as far as it has said."""
        if role in self._newest and (words := words_path(self._newest[role])).is_file():
            return words.read_text(encoding="utf-8", errors="replace")
        path = self.log_file(role)
        return last_words(path) if path is not None else "its last lines above say why"


def file_name(role: Role) -> str:
    return role.name.replace("/", "--")


def settings_of(role: Role, settings: Settings, status_file: Path) -> Settings:
    """What differs from process to process."""
    settings = settings.replace(status_file=str(status_file))
    if settings.observation.metrics_port > 0:
        index = 0 if role.service == "gateway" else role.index  # gateways take the next free one themselves
        port = settings.observation.metrics_port + METRICS_PORTS * PLACES.index(role.service) + index
        settings = settings.replace(metrics_port=port)
    if role.service == "worker" and settings.deployment.rank_port:
        settings = settings.replace(rank_port=settings.deployment.rank_port + role.index)
    if role.service != "gateway":
        return settings
    ports = {name: getattr(settings.gateway, name) for name in ("port", "http_port")}
    moved = {name: port + role.index for name, port in ports.items() if port > 0}
    return settings.replace(share_port=True, **moved)


def start(
    command: list[str], environment: Mapping[str, str], log_file: Path | None = None, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program that cannot outlive this one.  `inherited`: descriptors.

    It has its own process group, so that Ctrl-C reaches only us, but no session of its own: Linux shares out cores
    among sessions first (sched_autogroup), and a tokenizer's idle work would count for as much as a step.
    """
    command = [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *command]
    with contextlib.nullcontext() if log_file is None else opened(log_file) as out:
        err = None if out is None else subprocess.STDOUT
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            process_group=0,
            pass_fds=inherited,
        )


def start_fork_servers() -> ForkServers:
    """At the beginning of a command that will start services."""
    return ForkServers(lambda command, environment, inherited: start(command, environment, inherited=inherited))


def opened(log_file: Path) -> BinaryIO:
    """A log to append to.  Where there can be none (a full or read-only disk, a directory that went away), a service
    starts without: it is worth more than its lines."""
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return log_file.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


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
