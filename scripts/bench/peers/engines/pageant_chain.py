"""Pageant as its users meet it: `pageant serve`, every service a process, and gRPC clients, all on the same cores."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.peers.proc import command, peak_rss, tree
from services.cli.processes import start
from services.cli.serve import connect, with_port
from shared.config import Settings, load_settings, settings_environment

READY_SECONDS = 300


class Chain:
    def __init__(self, options: dict[str, Any]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pageant-bench-")
        own = {
            "port": 0,
            "http_port": -1,
            "runtime_dir": f"{self._directory.name}/run",
            "log_format": "json",
            "log_level": "warning",
        }
        settings = with_port(load_settings(options["settings"] | own, environ={}))
        self._serve = start(
            [sys.executable, "-m", "services.cli", "serve", "--log-dir", f"{self._directory.name}/logs"],
            os.environ | settings_environment(settings),
            Path(self._directory.name) / "serve.log",
        )
        self._wait_until_ready(settings)
        self._loop = asyncio.new_event_loop()
        address = f"{settings.gateway.host}:{settings.gateway.port}"
        self._channel, self._stub = self._loop.run_until_complete(_connect(address))
        self.version = f"pageant {version('pageant')}, {len(tree(self._serve.pid)) - 1} services"

    def _wait_until_ready(self, settings: Settings) -> None:
        client, deadline = connect(settings), time.monotonic() + READY_SECONDS
        try:
            while not client.serving:
                if self._serve.poll() is not None or time.monotonic() > deadline:
                    log = (Path(self._directory.name) / "serve.log").read_text()
                    raise RuntimeError(f"pageant serve does not come up: {log}")
                time.sleep(0.05)
        finally:
            client.close()

    def prepare(self, num_seqs: int, num_tokens: int) -> None:
        pass

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        begin = time.perf_counter()
        answers = self._loop.run_until_complete(self._all(requests))
        first = min(first for _, first in answers) - begin
        return {"num_tokens": [count for count, _ in answers], "first": first}

    async def _all(self, requests: list[tuple[list[int], int]]) -> list[tuple[int, float]]:
        return await asyncio.gather(*(self._generate(prompt, count) for prompt, count in requests))

    async def _generate(self, prompt: list[int], count: int) -> tuple[int, float]:
        """The number of tokens that came, and when the first did."""
        sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
        first, num_tokens = 0.0, 0
        async for message in self._stub.Generate(request):
            first = first or time.perf_counter()
            num_tokens += message.usage.completion_tokens
        return num_tokens, first

    def report(self) -> dict[str, Any]:
        workers = [pid for pid in tree(self._serve.pid) if command(pid).endswith("services.worker")]
        return {"worker_peak_rss": max(map(peak_rss, workers))}

    def close(self) -> None:
        self._loop.run_until_complete(self._channel.close())
        self._serve.terminate()
        self._serve.wait(30)
        self._directory.cleanup()


async def _connect(address: str) -> tuple[Any, Any]:
    channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
    return channel, inference_pb2_grpc.InferenceStub(channel)


load = Chain
