"""A troupe in containers for a test module, or the reason why there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common.stack import DockerError, Stack, lack

KEYS_ADVISED = "no_api_keys"  # said once: a container cannot see that its port is published on loopback


def why_not() -> str:
    """What keeps these tests from running; empty where nothing does."""
    if os.environ.get("PAGEANT_TEST_COMPOSE") != "1":
        return "set PAGEANT_TEST_COMPOSE=1 to try the containers"
    return lack()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_stack(directory: Path, **settings: Any) -> Iterator[Stack]:
    """Built, up and healthy; gone at the end, with its volumes.  Skips where there is no Docker."""
    if reason := why_not():
        pytest.skip(reason)
    stack = Stack(f"pageant-test-{os.getpid()}", free_port(), directory, **settings)
    try:
        stack.build()
        stack.up()
        yield stack
    finally:
        stack.down()


def until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def name_of(stack: Stack, service: str) -> str:
    return str(stack.containers(service)[0]["Name"])


def health(stack: Stack, name: str) -> str:
    return stack.inspect(name, "{{.State.Health.Status}}")


def crash(stack: Stack, name: str) -> None:
    with contextlib.suppress(DockerError):  # it may end with the container
        stack.docker("exec", name, "sh", "-c", "kill -9 -1")
