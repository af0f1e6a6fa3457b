"""Requests to a troupe, and what its gateway's log says of each when it has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.tracing.marks import LABEL, SEED

PATIENCE = 10.0  # seconds until a line that is due must be there
PROMPT = 24  # tokens
END = "request_finished"


def ask(number: int, *, is_marked: bool = False, num_prompt: int = PROMPT, num_tokens: int = 16) -> Any:
    """A request that shares no prefix with another of a different number."""
    ids = [100 + (number * 7919 + place * (1 + number % 13)) % 1500 for place in range(num_prompt)]
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids), label=LABEL if is_marked else "plain"
    )
    request.sampling.seed = number + (SEED if is_marked else 0)
    request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.temperature = num_tokens, True, 0.0
    return request


class Asker:
    """A connection to a gateway whose log can be read."""

    def __init__(self, address: str, log: Path) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._log = log

    def close(self) -> None:
        self._channel.close()

    def begin(self, request: Any) -> Any:
        """A call under way whose first output is there."""
        call = self._stub.Generate(request)
        next(iter(call))
        return call

    def line(self, request: Any) -> dict[str, Any]:
        """Ask, hear all of it, and read the line that ends it."""
        (request_id,) = {response.request_id for response in self._stub.Generate(request)}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for line in lines(self._log):
                if line.get("request_id") == request_id and line["event"] == END:
                    return line
            time.sleep(0.02)
        raise RuntimeError(f"the gateway's log does not tell of the end of {request_id}")


def lines(log: Path) -> Iterator[dict[str, Any]]:
    """All events in a log of JSON lines; what is none is left out."""
    for text in log.read_text(encoding="utf-8").splitlines():
        if text.startswith("{"):
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue  # not written to its end yet
