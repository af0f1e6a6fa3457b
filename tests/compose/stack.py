"""A troupe in containers for a test module, or the reason why there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common.stack import Stack, lack

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
