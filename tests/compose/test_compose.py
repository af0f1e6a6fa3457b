"""The containers as a user meets them: up, a stream from the host, replicas that come and go, logs, down."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from services.cli.client import Client
from tests.compose.stack import SERVICES, Stack, why_not

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

PROMPT = "Once upon a time"
GREEDY = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
FRONT_MEGABYTES = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if reason := why_not():
        pytest.skip(reason)
    started = Stack(f"pageant-test-{os.getpid()}", free_port())
    try:
        started.up()
        yield started
    finally:
        started.compose("down", "--volumes", "--remove-orphans")


def complete(stack: Stack) -> str:
    """One whole completion, which came in pieces."""
    client = Client(stack.address)
    pieces: list[str] = []
    try:
        text, figures = client.generate(GREEDY, pieces.append, text=PROMPT)
    finally:
        client.close()
    assert figures.completion_tokens == GREEDY["max_tokens"]
    assert len(pieces) > 10
    return text


@contextmanager
def streaming(stack: Stack, num_callers: int = 4) -> Iterator[list[str]]:
    """Callers that ask again and again meanwhile; whatever one of them meets fails the test."""
    texts: list[str] = []
    enough = threading.Event()

    def keep_asking() -> None:
        while not enough.is_set():
            texts.append(complete(stack))

    with ThreadPoolExecutor(num_callers) as pool:
        callers: list[Future[None]] = [pool.submit(keep_asking) for _ in range(num_callers)]
        try:
            yield texts
        finally:
            enough.set()
            for caller in callers:
                caller.result()


def test_only_the_gateway_can_be_reached(stack: Stack) -> None:
    found = stack.containers()
    assert sorted(one["Service"] for one in found) == sorted(SERVICES)
    assert {one["Health"] for one in found} == {"healthy"}
    published = {
        (one["Service"], port["URL"], port["TargetPort"]): port["PublishedPort"]
        for one in found
        for port in one["Publishers"] or ()
        if port["PublishedPort"]
    }
    assert set(published) == {("gateway", "127.0.0.1", 50051), ("gateway", "127.0.0.1", 8000)}
    assert published["gateway", "127.0.0.1", 50051] == int(stack.address.split(":")[1])


def test_the_front_is_small_and_nobody_has_rights(stack: Stack) -> None:
    for service in SERVICES:
        assert stack.run_in(service, "id", "-u") == "1000"
        assert stack.run_in(service, "sh", "-c", "touch /app/x 2>/dev/null || echo refused") == "refused"
        assert stack.run_in(service, "sh", "-c", "command -v cc gcc g++ clang || echo none") == "none"
        assert int(stack.run_in(service, "awk", "/^CapEff/ {print $2}", "/proc/1/status"), 16) == 0
    sizes = stack.run_in("gateway", "du", "-sm", "/opt/venv", "/app").splitlines()
    assert sum(int(line.split()[0]) for line in sizes) < FRONT_MEGABYTES
    assert stack.run_in("gateway", "find", "/opt/venv", "-maxdepth", "5", "-name", "torch") == ""


def test_replicas_come_and_go_while_requests_stream(stack: Stack) -> None:
    expected = complete(stack)
    seen: list[dict[str, Any]] = []
    with streaming(stack) as texts:
        stack.up(tokenizer=2, worker=2)
        settle(texts)
        seen += stack.logs()  # while the containers that are about to go are still there
        stack.up(tokenizer=1, worker=1)
        settle(texts)
    followed = by_request(seen)
    assert len(followed) > 4
    for about in followed.values():
        check_joinable(about)
    seen += stack.logs()
    assert len(texts) > 10
    assert set(texts) == {expected}, "greedy text depends on the prompt alone, whoever comes and goes"
    for service in ("tokenizer", "worker"):
        names = {line["instance"] for line in seen if line.get("service") == service and line["event"] == "ready"}
        assert len(names) == 2
    used = {line["worker"] for line in seen if line["event"] == "sequence_scheduled"}
    assert len(used) == 2, "both workers had work"


def settle(texts: list[str]) -> None:
    """Until each caller has had a whole answer after now."""
    goal, deadline = len(texts) + 8, time.monotonic() + 60
    while len(texts) < goal and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(texts) >= goal, "answers keep coming"


def by_request(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The lines of each request that has ended."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "request_id" in line:
            found[line["request_id"]].append(line)
    return {
        request_id: about
        for request_id, about in found.items()
        if any(line["event"] == "request_finished" for line in about)
    }


def check_joinable(about: list[dict[str, Any]]) -> None:
    assert {line["service"] for line in about} >= {"gateway", "tokenizer", "scheduler"}
    assert len({line["trace_id"] for line in about}) == 1
    assert all(line["trace_id"] for line in about)


def test_the_logs_are_clean(stack: Stack) -> None:
    complete(stack)
    lines = stack.logs()
    assert {line["service"] for line in lines} == set(SERVICES)
    assert not [line for line in lines if line["level"] not in ("debug", "info")]
    assert PROMPT not in str(lines)
    check_joinable(max(by_request(lines).values(), key=lambda about: max(line["timestamp"] for line in about)))
