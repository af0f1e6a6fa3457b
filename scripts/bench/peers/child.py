"""An engine as this process sees it: a child that stays up, follows orders, and rests while others run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import services.cli.supervision.launch as launch
from scripts.bench.common.deployment import signal_all
from scripts.bench.common.proc import tree, tree_cpu_seconds
from scripts.bench.peers.catalog import PeerEngine
from scripts.bench.peers.workloads import Request, Workload

HOST = Path(__file__).with_name("host.py")
LOAD_SECONDS = 600
CLOSE_SECONDS = 40
OWN_LIBRARIES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class EngineFailed(Exception):
    """An engine did not start, died, gave a wrong number of tokens or took too long."""


class EngineProcess:
    """One engine's process.  Invariant: a peer's processes are stopped except within `awake`; our own never are, so
    that they are seen where they do not rest."""

    def __init__(self, engine: PeerEngine, log_dir: Path) -> None:
        self.engine = engine
        self._log = log_dir / f"{engine.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(launch.__file__), str(os.getpid()), *_command(engine)],
                env=_environment(engine),
                cwd=log_dir,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            loaded = self._answer(LOAD_SECONDS)
        except EngineFailed:
            self.close()
            raise
        self.version: str = loaded["version"]
        self.load_seconds: float = loaded["load_seconds"]
        self._sleep()

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the engine and all its processes."""
        return tree_cpu_seconds(self._process.pid)

    @property
    def pids(self) -> list[int]:
        """Of the engine and all its processes."""
        return tree(self._process.pid)

    def prepare(self, workload: Workload, vocab_size: int, timeout: float) -> float:
        """Load what depends on the workload's shape, and run a little of it; returns the seconds that took."""
        requests = workload.requests(0, vocab_size)
        longest = max(len(prompt) + count for prompt, count in requests)
        self._order({"order": "prepare", "num_seqs": len(requests), "num_tokens": longest}, timeout)
        return float(self.run(workload.warm_up(vocab_size), timeout)["seconds"])

    def use_adapters(self, count: int) -> None:
        """Requests take turns with so many of those that the engine was given."""
        self._order({"order": "adapters", "count": count}, CLOSE_SECONDS)

    def run(self, requests: list[Request], timeout: float) -> dict[str, Any]:
        """`seconds`, and `first` where known.  Raises EngineFailed where any request got another number of tokens."""
        answer = self._order({"order": "run", "requests": requests}, timeout)
        wanted = [count for _, count in requests]
        if answer["num_tokens"] != wanted:
            raise EngineFailed(f"{self.engine.name}: asked for {wanted} tokens, got {answer['num_tokens']}")
        return answer

    def report(self) -> dict[str, Any]:
        return self._order({"order": "report"}, CLOSE_SECONDS)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._sleep()

    def close(self) -> None:
        """End the engine, kindly and then not."""
        self._signal(signal.SIGCONT)
        processes = self.pids
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(CLOSE_SECONDS)
        signal_all(processes, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _sleep(self) -> None:
        if not self.engine.is_ours:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        signal_all(self.pids, number)

    def _order(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{self.engine.name} is gone; see {self._log}") from error
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        """The next line; an engine that takes longer is killed."""
        assert self._process.stdout is not None
        overdue = threading.Event()
        timer = threading.Timer(timeout, self._give_up, [overdue])
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:  # also where a signal ends this process, which would wait for the timer
            timer.cancel()
        if overdue.is_set():
            raise EngineFailed(f"{self.engine.name}: no answer in {timeout:g} s")
        if not line:
            raise EngineFailed(f"{self.engine.name} died; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self.engine.name}: {answer['error']}; see {self._log}")
        return answer

    def _give_up(self, overdue: threading.Event) -> None:
        overdue.set()
        self._signal(signal.SIGKILL)


def _command(engine: PeerEngine) -> list[str]:
    return [str(engine.python), "-P", str(HOST), str(engine.file), json.dumps(engine.options)]


def _environment(engine: PeerEngine) -> dict[str, str]:
    """Ours find the project; a peer must not, because `kernels` is also a name of theirs."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    own = ("PYTHONPATH", engine.root) if engine.is_ours else ("OMP_NUM_THREADS", engine.options["num_threads"])
    return inherited | OWN_LIBRARIES | {own[0]: str(own[1])}
