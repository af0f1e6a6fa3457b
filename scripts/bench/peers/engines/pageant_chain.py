"""Pageant as its users meet it: `pageant serve`, every service a process, and gRPC clients, all on the same cores."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.deployment import ServedDeployment
from scripts.bench.common.proc import peak_rss


class Chain:
    def __init__(self, options: dict[str, Any]) -> None:
        self._deployment = ServedDeployment(options["settings"])
        self._loop = asyncio.new_event_loop()
        self.version = f"pageant {version('pageant')}, {len(self._deployment.pids())} services"

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        slots = [[_request(prompt, count)] for prompt, count in requests]
        played = self._loop.run_until_complete(self._deployment.play(slots))
        first = min(answer.first for answer in played.answers) - played.begin
        return {"num_tokens": [answer.num_tokens for answer in played.answers], "first": first}

    def report(self) -> dict[str, Any]:
        return {"worker_peak_rss": max(map(peak_rss, self._deployment.pids("worker")))}

    def close(self) -> None:
        self._deployment.close()


def _request(prompt: list[int], count: int) -> Any:
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    stream = inference_pb2.StreamOptions(gather=True)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling, stream=stream)


load = Chain
