"""Systems that can be the backend of a store, started for a test.

What a system needs and this environment lacks makes its test skip: Mooncake and NIXL their packages (the extras
`mooncake` and `nixl`), LMCache the path of its `lmcache_server`, in PAGEANT_TEST_LMCACHE.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.harness import free_port


@contextmanager
def serving(command: Sequence[str | Path], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that listens at a port."""
    with log.open("wb") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield process
        finally:
            process.kill()


@contextmanager
def mooncake(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
    try:
        store = importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake cannot be loaded: {error}")
    port = free_port()
    master = Path(str(store.__file__)).parent / "mooncake_master"
    options = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with serving([master, *options], port, directory / "master.log") as process:
        yield f"mooncake://127.0.0.1:{port}?segment=64MiB", process


@contextmanager
def lmcache(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
    server = os.environ.get("PAGEANT_TEST_LMCACHE")
    if not server:
        pytest.skip("PAGEANT_TEST_LMCACHE does not name an lmcache_server")
    port = free_port()
    with serving([server, "127.0.0.1", str(port)], port, directory / "server.log") as process:
        yield f"lmcache://127.0.0.1:{port}", process


@contextmanager
def nixl(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        pytest.skip(f"NIXL cannot be loaded: {error}")
    yield f"nixl://POSIX{directory}/blocks", None


SYSTEMS = {"mooncake": mooncake, "lmcache": lmcache, "nixl": nixl}
