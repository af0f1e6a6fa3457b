"""Runs tests in forks of one process that has imported the large packages: most faults are noticed in less time than
those imports take."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation.reach import OPTIONS, environment

# Imported before the first fork.  None of the project's own, which a fault changes; no plugins of pytest, which warns
# of those that are there before it; no triton, whose interpreter the tests choose as they begin.
PACKAGES = (
    "torch", "numpy", "zmq.asyncio", "msgspec", "grpc.aio",
    "xxhash", "google.protobuf.message", "prometheus_client", "structlog", "tokenizers", "jinja2.sandbox",
)  # fmt: skip
HUNG = -1


class MutantForks:
    """A process that runs tests in one copy of the sources, in a fork of its own each time."""

    def __init__(self, place: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], cwd=place, env=environment(place), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, tests: list[str], patience: float) -> int:
        """The exit status of pytest, `HUNG` where it did not end within `patience` seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"tests": tests, "patience": patience}) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer each line of the standard input, a run of tests, with its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("r+b") as nothing:  # tests print, and may read
        asked = os.fdopen(os.dup(0))
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    for package in PACKAGES:
        with suppress(ImportError):
            importlib.import_module(package)
    signal.signal(signal.SIGALRM, _over)
    for line in asked:
        print(json.dumps(_forked(**json.loads(line))), file=answers, flush=True)


def _forked(tests: list[str], patience: float) -> int:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.setsid()  # with a group of its own, in which what it starts is ended too
        code: int = 1
        with suppress(BaseException):
            code = int(pytest.main([*OPTIONS, "-x", "--timeout=60", *tests]))
        os._exit(code)
    signal.setitimer(signal.ITIMER_REAL, patience)
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        status = HUNG
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if status == HUNG:
        os.waitpid(child, 0)
    return status


def _over(*_: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    serve()
