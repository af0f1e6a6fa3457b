"""Deployments of real processes for benches: services one by one, with a stand-in for a worker, or `pageant serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from protos.pageant.v1 import control_pb2, control_pb2_grpc
from scripts.bench.common.clients import OPTIONS, ClientConnections
from scripts.bench.common.proc import ProcessUsage, service_pids, tree, tree_cpu_seconds, usage
from scripts.bench.common.tokens import MODEL
from services.cli.addresses import with_port
from services.cli.display.client import TerminalClient
from services.cli.supervision.processes import last_words, start
from shared.config import Settings, load_settings, settings_environment

SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer")
READY_SECONDS = 300  # until all serve: a busy machine takes its time to load torch
STOP_SECONDS, SERVE_STOP_SECONDS = 10, 30
REQUEST_SECONDS = 900
NEVER = 1e6  # seconds: a deployment that is stopped by signal must not take its own silence for a death
PORTS = (20_000, 30_000)  # Linux gives connections others
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

Request = Any  # a pageant.v1.GenerateRequest


class LocalDeployment:
    """The processes by name."""

    def __init__(self, settings: Settings, logs: Path) -> None:
        self.settings = settings
        self.address = f"127.0.0.1:{settings.gateway.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = logs

    def usages(self) -> dict[str, ProcessUsage]:
        self.check()
        return {name: usage(process.pid) for name, process in self.processes.items()}

    def check(self) -> None:
        """Raise RuntimeError with the last words of a process that has died."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with status {process.returncode}: {last_words(self.log_of(name))}")

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def with_stand_in(
    step_ms: float, *, modules: Mapping[str, Sequence[str]] | None = None, **settings: Any
) -> AbstractContextManager[LocalDeployment]:
    """Serves the bundled model's tokenizer over gRPC until the block ends; the worker takes a fixed time per step."""
    worker = ["-m", "scripts.bench.common.standin", "--step-ms", str(step_ms)]
    return with_worker(worker, modules=modules, **settings)


@contextmanager
def with_worker(
    worker: Sequence[str] = ("-m", "services.worker"),
    *,
    modules: Mapping[str, Sequence[str]] | None = None,
    **settings: object,
) -> Iterator[LocalDeployment]:
    """Serves until the block ends, with a worker that Python starts with these arguments; leaves no process behind.

    `modules`: by service, what `python -m` is to run in its place, or beside the others.
    """
    with tempfile.TemporaryDirectory(prefix="pageant-bench-") as directory:
        own = {"model": str(MODEL), "port": 0, "http_port": -1, "runtime_dir": f"{directory}/run", "log_format": "json"}
        running = LocalDeployment(with_port(Settings.of(**(own | settings))), Path(directory))
        environment = os.environ | settings_environment(running.settings)
        commands = {name: [sys.executable, "-m", f"services.{name}"] for name in SERVICES}
        commands["worker"] = [sys.executable, *worker]
        commands |= {name: [sys.executable, "-m", *words] for name, words in (modules or {}).items()}
        try:
            for name, words in commands.items():
                running.processes[name] = start(words, environment, running.log_of(name))
            wait_until_serving(running.address, running.check)
            yield running
        finally:
            stop(running.processes.values())


def lasting_port() -> int:
    """The first of two free ports that follow each other, which no connection gets by chance meanwhile."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port


def wait_until_serving(address: str, check: Callable[[], None]) -> None:
    """`check` raises RuntimeError where that is not to be hoped for."""
    client, deadline = TerminalClient(address), time.monotonic() + READY_SECONDS
    with contextlib.closing(client):
        while not client.serving:
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the deployment does not serve within {READY_SECONDS} s")
            time.sleep(0.05)


def log_lines(log: Path) -> Iterator[dict[str, Any]]:
    """What a service that logs JSON has said; without other lines, and one that is not written to its end yet."""
    for text in log.read_text(encoding="utf-8").splitlines():
        if text.startswith("{") and text.endswith("}"):
            yield json.loads(text)


def stop(children: Collection[subprocess.Popen[bytes]]) -> None:
    """End all kindly, then kill those that stay."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@dataclass(frozen=True)
class Answer:
    """One request's only sequence; `first`: when its first message came (time.perf_counter)."""

    token_ids: tuple[int, ...]
    num_tokens: int
    first: float


@dataclass(frozen=True)
class Played:
    """How long a set of slots took, and the answers in order of slots."""

    begin: float
    seconds: float
    answers: list[Answer]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)


class ServedDeployment:
    """All processes of one `pageant serve`, from its readiness to `close`."""

    def __init__(self, settings: dict[str, Any], *options: str) -> None:
        """`options`: of `pageant serve` that are no settings."""
        self._directory = tempfile.TemporaryDirectory(prefix="pageant-bench-")
        path = Path(self._directory.name)
        self.runtime_dir, self.log_dir = path / "run", path / "logs"
        own = {"port": 0, "http_port": -1, "runtime_dir": f"{path}/run", "log_format": "json", "log_level": "warning"}
        chosen = with_port(load_settings(own | settings, environ={}))
        self.address = f"{chosen.gateway.host}:{chosen.gateway.port}"
        self._log = path / "serve.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGEANT_")}
        self._environment = inherited | settings_environment(chosen)
        self._words = [sys.executable, "-m", "services.cli", "serve", "--log-dir", f"{path}/logs", *options]
        self._start()

    def _start(self) -> None:
        self._serve = start(self._words, self._environment, self._log)
        try:
            wait_until_serving(self.address, self._check)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._serve.poll() is not None:
            raise RuntimeError(f"pageant serve does not come up: {last_words(self._log)}")

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all processes so far."""
        return tree_cpu_seconds(self._serve.pid)

    def pids(self, service: str = "") -> list[int]:
        """Of a service, or of all."""
        return service_pids(self._serve.pid, service) if service else tree(self._serve.pid)[1:]

    def counts(self) -> Counter[str]:
        """What the scheduler has counted of drafts so far, by the names of its load."""
        with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            load = stub.GetLoad(control_pb2.GetLoadRequest(), timeout=SERVE_STOP_SECONDS)
        return Counter({name: getattr(load, name) for name in COUNTS})

    async def play(self, slots: Sequence[Sequence[Request]]) -> Played:
        return await play(self.address, slots)

    def close(self) -> None:
        self.signal_all(signal.SIGCONT)
        self._serve.terminate()
        try:
            self._serve.wait(SERVE_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._directory.cleanup()

    def begin_anew(self) -> None:
        """Kill all at once; others go on at the same address, with the same folders."""
        self._kill()
        self._start()

    def _kill(self) -> None:
        self.signal_all(signal.SIGKILL)
        self._serve.wait()

    def signal_all(self, number: signal.Signals) -> None:
        signal_all(tree(self._serve.pid), number)


class RestingDeployment(ServedDeployment):
    """Invariant: all processes are stopped by signal except within `awake`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__({"heartbeat_timeout": NEVER} | settings)
        self.signal_all(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal_all(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal_all(signal.SIGSTOP)


def signal_all(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def play(address: str, slots: Sequence[Sequence[Request]]) -> Played:
    """Every slot a stream at a time, one request after the other, all slots at once."""
    async with ClientConnections(address) as made:
        await made.channels[0].channel_ready()
        begin = time.perf_counter()
        played = await asyncio.gather(*(_play_slot(made.stubs[0], slot) for slot in slots))
        seconds = time.perf_counter() - begin
    return Played(begin, seconds, [answer for answers in played for answer in answers])


async def _play_slot(stub: Any, slot: Sequence[Request]) -> list[Answer]:
    return [await generate(stub, request) for request in slot]


async def generate(stub: Any, request: Request) -> Answer:
    """One stream to its end.  Raises grpc.RpcError."""
    token_ids: list[int] = []
    usage, first = None, 0.0
    async for message in stub.Generate(request, timeout=REQUEST_SECONDS):
        first = first or time.perf_counter()
        token_ids += message.token_ids
        if message.finish_reason:
            usage = message.usage
    if usage is None:
        raise RuntimeError("a stream ended without its last message")
    return Answer(tuple(token_ids), usage.completion_tokens, first)
