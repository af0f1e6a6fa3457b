"""`pageant serve` with settings of its own, as a child that rests while others run, and a client's view of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from protos.pageant.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from scripts.bench.peers.proc import command, tree, tree_cpu_seconds
from services.cli.processes import last_words, start
from services.cli.serve import connect, with_port
from shared.config import load_settings, settings_environment

READY_SECONDS = 300
STOP_SECONDS = 30
REQUEST_SECONDS = 900
NEVER = 1e6  # seconds: a deployment that is stopped by signal must not take its own silence for a death
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]

Request = Any  # a pageant.v1.GenerateRequest


@dataclass(frozen=True)
class TimedAnswer:
    """One request's only sequence."""

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Played:
    """How long a set of slots took, and the answers in order of slots."""

    seconds: float
    answers: list[TimedAnswer]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


@dataclass(frozen=True)
class Counts:
    """What the scheduler has counted so far."""

    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_stale_draft_tokens: int
    num_late_drafts: int
    num_preemptions: int
    num_accepted_tokens_per_position: tuple[int, ...]

    def since(self, before: Counts) -> Counts:
        positions = self.num_accepted_tokens_per_position
        earlier = before.num_accepted_tokens_per_position + (0,) * len(positions)
        differences = {
            name: getattr(self, name) - getattr(before, name)
            for name in self.__dataclass_fields__
            if name != "num_accepted_tokens_per_position"
        }
        grown = tuple(now - then for now, then in zip(positions, earlier, strict=False))
        return Counts(**differences, num_accepted_tokens_per_position=grown)


class SpeculatingDeployment:
    """All processes of one `pageant serve`, from its readiness to `close`."""

    def __init__(self, settings: dict[str, Any], *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pageant-bench-")
        self._path = Path(self._directory.name)
        own = {
            "port": 0,
            "http_port": -1,
            "runtime_dir": f"{self._path}/run",
            "log_format": "json",
            "log_level": "warning",
        }
        chosen = with_port(load_settings(own | settings, environ={}))
        self.address = f"{chosen.gateway.host}:{chosen.gateway.port}"
        self._serve = start(
            [sys.executable, "-m", "services.cli", "serve", "--log-dir", f"{self._path}/logs", *arguments],
            _without_settings() | settings_environment(chosen),
            self._path / "serve.log",
        )
        try:
            self._wait_until_serving(connect(chosen))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all processes so far."""
        return tree_cpu_seconds(self._serve.pid)

    def pids(self, service: str) -> list[int]:
        return [pid for pid in tree(self._serve.pid) if command(pid).endswith(f"services.{service}")]

    def counts(self) -> Counts:
        with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            load = stub.GetLoad(control_pb2.GetLoadRequest(), timeout=STOP_SECONDS)
        own = {name: getattr(load, name) for name in Counts.__dataclass_fields__ if name != "num_steps"}
        own["num_accepted_tokens_per_position"] = tuple(load.num_accepted_tokens_per_position)
        return Counts(num_steps=sum(worker.num_steps for worker in load.workers), **own)

    async def play(self, slots: Sequence[Sequence[Request]], heard: Callable[[], None] = lambda: None) -> Played:
        """Every slot a stream at a time, one request after the other, all slots at once; `heard` after each answer."""
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await channel.channel_ready()
            begin = time.perf_counter()
            played = await asyncio.gather(*(_play_slot(stub, slot, heard) for slot in slots))
            seconds = time.perf_counter() - begin
        return Played(seconds, [answer for answers in played for answer in answers])

    def close(self) -> None:
        self.signal_all(signal.SIGCONT)
        self._serve.terminate()
        try:
            self._serve.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self._serve.wait()
        self._directory.cleanup()

    def signal_all(self, number: signal.Signals) -> None:
        for pid in tree(self._serve.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_until_serving(self, client: Any) -> None:
        deadline = time.monotonic() + READY_SECONDS
        with contextlib.closing(client):
            while not client.serving:
                if self._serve.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"pageant serve does not come up: {last_words(self._path / 'serve.log')}")
                time.sleep(0.05)


class RestingDeployment(SpeculatingDeployment):
    """Invariant: all processes are stopped by signal except within `awake`."""

    def __init__(self, settings: dict[str, Any], *arguments: str) -> None:
        super().__init__({"heartbeat_timeout": NEVER} | settings, *arguments)
        self.signal_all(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal_all(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal_all(signal.SIGSTOP)


async def _play_slot(stub: Any, slot: Sequence[Request], heard: Callable[[], None]) -> list[TimedAnswer]:
    answers = []
    for request in slot:
        answers.append(await generate(stub, request))
        heard()
    return answers


async def generate(stub: Any, request: Request) -> TimedAnswer:
    """One stream to its end.  Raises grpc.RpcError."""
    token_ids: list[int] = []
    usage = None
    async for message in stub.Generate(request, timeout=REQUEST_SECONDS):
        token_ids += message.token_ids
        if message.finish_reason:
            usage = message.usage
    if usage is None:
        raise RuntimeError("a stream ended without its last message")
    return TimedAnswer(tuple(token_ids), usage.num_draft_tokens, usage.num_accepted_tokens)


def _without_settings() -> dict[str, str]:
    """The environment, in which only the deployment's own settings count."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PAGEANT_")}
