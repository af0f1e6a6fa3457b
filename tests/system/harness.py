"""A real troupe: `pageant serve` as a child process, real sockets, real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "pageant-stories"
READY_SECONDS = 90
QUIET_SECONDS = 5  # for a service's lines to be in its file; one that serves may never be quiet


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Answer:
    """One sequence of one request, as the client saw it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    stop_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_messages: int = 0


class Troupe:
    """A running deployment."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, http_port: int, log_dir: Path) -> None:
        self.process = process
        self.harmed_at = 0.0  # Unix seconds, of the last `kill`
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://127.0.0.1:{http_port}"
        self.log_dir = log_dir

    def channel(self) -> Any:
        return grpc.aio.insecure_channel(self.address, options=[("grpc.max_receive_message_length", -1)])

    def logs(self) -> list[dict[str, Any]]:
        """All structured lines of all services, once no more come: threads write them a moment after what they tell."""
        self._until_quiet()
        found = []
        for path in sorted(self.log_dir.iterdir()):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("{"):
                    found.append(json.loads(line))
        return found

    def _until_quiet(self) -> None:
        deadline, before = time.monotonic() + QUIET_SECONDS, None
        while time.monotonic() < deadline:
            sizes = [path.stat().st_size for path in sorted(self.log_dir.iterdir())]
            if sizes == before:
                return
            before = sizes
            time.sleep(0.1)

    def pids(self, service: str) -> list[int]:
        """Process ids of a service's instances, read from the process table below this one."""
        return [pid for pid, command in self._children() if command.endswith(f"services.{service}")]

    def fork_servers(self, imports: str = "") -> list[int]:
        """Process ids of those that fork services; of all, or of the one with these imports."""
        found = [(pid, command) for pid, command in self._children() if "services.fork_server" in command]
        return [pid for pid, command in found if command.endswith(imports)]

    def _children(self) -> list[tuple[int, str]]:
        command = ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        lines = subprocess.run(command, capture_output=True, check=True).stdout.decode().splitlines()
        return [(int(line.split()[0]), line) for line in lines]

    def kill(self, service: str, number: signal.Signals = signal.SIGKILL, *, at_most: int | None = None) -> None:
        """A signal to so many instances of a service, or to all."""
        self.harmed_at = time.time()
        for pid in self.pids(service)[:at_most]:
            os.kill(pid, number)

    def load(self) -> Any:
        with grpc.insecure_channel(self.address) as channel:
            return control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=10)

    def settled_load(self) -> Any:
        """The load once nothing runs any more."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            load = self.load()
            if not load.num_running and not load.num_waiting:
                return load
            time.sleep(0.05)
        raise AssertionError(f"requests are left over: {load}")

    def until_serving(self, patience: float = 60) -> None:
        """Return once a request succeeds; until then each must be refused as UNAVAILABLE, and for no other reason."""
        deadline = time.monotonic() + patience
        while True:
            try:
                ((answer,),) = self.generate([ask("One day", max_tokens=5, ignore_eos=True)])
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert time.monotonic() < deadline, error.details()
                time.sleep(0.1)
            else:
                assert answer.completion_tokens == 5
                return

    def generate(self, requests: list[Any], **options: Any) -> list[list[Answer]]:
        """All requests at once."""
        return asyncio.run(self._generate(requests, **options))

    async def disturb(
        self,
        requests: list[Any],
        service: str,
        number: signal.Signals = signal.SIGKILL,
        *,
        at_most: int | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """All requests at once, and while they stream `first` and a signal to a service; answers, or what failed."""
        async with self.channel() as channel:
            tasks = await streaming(channel, requests)
            first()
            self.kill(service, number, at_most=at_most)
            return await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, requests: list[Any], timeout: float = 240) -> list[list[Answer]]:
        async with self.channel() as channel:
            return await asyncio.gather(*(collect(channel, request, timeout) for request in requests))


async def streaming(channel: Any, requests: list[Any]) -> list[asyncio.Task[list[Answer]]]:
    """All requests at once; returns when each streams."""
    begun = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(collect(channel, request, begun=event))
        for request, event in zip(requests, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    return tasks


async def collect(
    channel: Any, request: Any, timeout: float = 240, *, begun: asyncio.Event | None = None
) -> list[Answer]:
    """One request's sequences, to the end; `begun` is set once it streams."""
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    answers = [Answer() for _ in range(max(1, request.sampling.n))]
    async for message in stub.Generate(request, timeout=timeout):
        if begun is not None:
            begun.set()
        answer = answers[message.index]
        answer.text += message.text
        answer.token_ids += message.token_ids
        answer.num_messages += 1
        if message.finish_reason:
            answer.finish_reason, answer.stop_reason = message.finish_reason, message.stop_reason
            answer.prompt_tokens = message.usage.prompt_tokens
            answer.cached_tokens = message.usage.cached_tokens
            answer.completion_tokens = message.usage.completion_tokens
            answer.num_draft_tokens = message.usage.num_draft_tokens
            answer.num_accepted_tokens = message.usage.num_accepted_tokens
    return answers


def ask(text: str | None = None, *, token_ids: list[int] | None = None, **sampling: Any) -> Any:
    """A GenerateRequest that returns token ids too."""
    request = inference_pb2.GenerateRequest(stream=inference_pb2.StreamOptions(return_token_ids=True))
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    elif text is not None:
        request.text = text
    for name, value in sampling.items():
        if name == "logit_bias":
            request.sampling.logit_bias.update(value)
        elif isinstance(value, list):
            getattr(request.sampling, name).extend(value)
        else:
            setattr(request.sampling, name, value)
    return request


@contextmanager
def troupe(
    directory: Path, *options: str, descriptors: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[Troupe]:
    """`pageant serve` with options; checks that it ends well, quickly, and leaves no process behind.

    `descriptors`: that each of its processes may have at most; 0: as many as this one.  `environment`: added to ours.
    """
    port, http_port = free_port(), free_port()
    log_dir = directory / "logs"
    own = {
        "--port": str(port),
        "--http-port": str(http_port),
        "--runtime-dir": str(directory / "run"),
        "--log-dir": str(log_dir),
        "--log-format": "json",
    }
    flags = [word for pair in own.items() for word in pair]
    command = [sys.executable, "-m", "services.cli", "serve", *flags, *options]
    if "-m" not in options:
        command += ["-m", str(MODEL)]
    if descriptors:
        command = ["prlimit", f"--nofile={descriptors}:{descriptors}", *command]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})})
    running = Troupe(process, port, http_port, log_dir)
    try:
        wait_until_ready(process)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    """Read what serve says until it says that it is ready."""
    assert process.stderr is not None
    deadline, said = time.monotonic() + READY_SECONDS, b""
    while time.monotonic() < deadline:
        line = process.stderr.readline()
        said += line
        if b"ready:" in line:
            return
        assert line or process.poll() is None, said.decode()
    raise AssertionError(f"not ready in {READY_SECONDS} s: {said.decode()}")
