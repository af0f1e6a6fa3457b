"""Callers of a troupe in containers, who fail the test where one of their requests fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2_grpc
from services.cli.display.client import TerminalClient

PROMPT = "Once upon a time"
GREEDY = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}


def complete(address: str, fewest_pieces: int = 1) -> str:
    """One whole completion over a connection of its own.  A stream that was resumed may come in few pieces."""
    client = TerminalClient(address)
    pieces: list[str] = []
    try:
        text, figures = client.generate(GREEDY, pieces.append, text=PROMPT)
    finally:
        client.close()
    assert figures.completion_tokens == GREEDY["max_tokens"]
    assert len(pieces) >= fewest_pieces
    return text


def listen(address: str, request: Any, most: int = 0) -> tuple[str, list[int]]:
    """Text and token ids of one call, of its first `most` messages where there are more.  Raises grpc.RpcError."""
    text, token_ids = "", []
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for number, response in enumerate(stub.Generate(request, timeout=60), start=1):
            text += response.text
            token_ids += response.token_ids
            if number == most:
                break
    return text, token_ids


@contextmanager
def streaming(address: str, num_callers: int = 4) -> Iterator[list[str]]:
    """Callers that ask again and again meanwhile; whatever one of them meets fails the test."""
    texts: list[str] = []
    enough = threading.Event()

    def keep_asking() -> None:
        while not enough.is_set():
            texts.append(complete(address))

    with ThreadPoolExecutor(num_callers) as pool:
        callers: list[Future[None]] = [pool.submit(keep_asking) for _ in range(num_callers)]
        try:
            yield texts
        finally:
            enough.set()
            for caller in callers:
                caller.result()


def settle(texts: list[str]) -> None:
    """Until each caller has had a whole answer after now."""
    goal, deadline = len(texts) + 8, time.monotonic() + 60
    while len(texts) < goal and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(texts) >= goal, "answers keep coming"
