"""Requests to a deployment, and what its gateway's log says of each when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from scripts.bench.common.deployment import log_lines

LABEL = "delayed"  # how services that have a request's header know that it is to be delayed
SEED = 1 << 40  # how the others know it: by a seed of this or more
PATIENCE = 10.0  # seconds until a line that is due must be there
PROMPT = 24  # tokens
END = "request_finished"


def ask(number: int, *, is_marked: bool = False, num_prompt: int = PROMPT, num_tokens: int = 16) -> Any:
    """A request that shares no prefix with another of a different number."""
    ids = [100 + (number * 7919 + place * (1 + number % 13)) % 1500 for place in range(num_prompt)]
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids),
        label=LABEL if is_marked else "plain",
        sampling=inference_pb2.SamplingParams(
            seed=number + (SEED if is_marked else 0), max_tokens=num_tokens, ignore_eos=True, temperature=0.0
        ),
    )


class Requester:
    """A connection to a gateway whose log can be read."""

    def __init__(self, channel: grpc.Channel, log: Path) -> None:
        self._stub: Any = inference_pb2_grpc.InferenceStub(channel)
        self._log = log

    def begin(self, request: Any) -> Any:
        """A call under way whose first output is there."""
        call = self._stub.Generate(request)
        next(iter(call))
        return call

    def line(self, request: Any) -> dict[str, Any]:
        """The log's line that ends a request."""
        (request_id,) = {response.request_id for response in self._stub.Generate(request)}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for line in ended(self._log):
                if line["request_id"] == request_id:
                    return line
            time.sleep(0.02)
        raise RuntimeError(f"the gateway's log does not tell of the end of {request_id}")


def ended(log: Path) -> Iterator[dict[str, Any]]:
    """The lines that end requests."""
    return (line for line in log_lines(log) if line["event"] == END)
