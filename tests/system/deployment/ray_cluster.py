"""A Ray cluster of logical nodes on loopback, each `ray start --block`, with little memory and no dashboard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.harness import free_port

NODE_SECONDS = 60.0
STORE_BYTES = 80_000_000  # Ray takes no less
QUICK_DEATH = '{"health_check_initial_delay_ms":1000,"health_check_period_ms":500,"health_check_failure_threshold":3}'
OPTIONS = ("--block", "--object-store-memory", str(STORE_BYTES), "--include-log-monitor=false",
           "--disable-usage-stats")  # fmt: skip


class RayNode:
    """One node: `ray start` and the processes below it."""

    def __init__(self, process: subprocess.Popen[bytes], host: str) -> None:
        self.process = process
        self.host = host

    def actors(self) -> list[int]:
        """Process ids of our actors there."""
        return [pid for pid, name in below(self.process.pid) if name.startswith("ray::PlacedRank")]

    def ranks(self) -> list[int]:
        """Process ids of what our actors have started there, in the order of their start."""
        return sorted(pid for actor in self.actors() for pid, _ in below(actor))

    def kill(self) -> None:
        """All of it at once, as when its host is gone; children first stopped, so that none says a word."""
        pids = [pid for pid, _ in below(self.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (self.process.pid, *pids):
                send(pid, number)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class RayCluster:
    """Nodes at 127.0.0.2, 127.0.0.3, ...: Ray gives 127.0.0.1 another name."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.address = f"127.0.0.2:{free_port()}"
        self.nodes: list[RayNode] = []
        self._directory = directory
        self._log = log

    def add(self, num_cpus: int = 1) -> RayNode:
        """The first is the head."""
        host = f"127.0.0.{2 + len(self.nodes)}"
        port = self.address.partition(":")[2]
        role = ["--address", self.address]
        if not self.nodes:
            role = ["--head", "--port", port, "--include-dashboard=false", "--system-config", QUICK_DEATH]
        where = ["--node-ip-address", host, "--temp-dir", str(self._directory), "--num-cpus", str(num_cpus)]
        log = self._log / f"ray-{host}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *where, *OPTIONS],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            )  # fmt: skip
        self.nodes.append(node := RayNode(process, host))
        deadline = time.monotonic() + NODE_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        return node


@contextmanager
def ray_cluster(log: Path, *num_cpus: int) -> Iterator[RayCluster]:
    """A node for each number of CPUs; all are ended afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="pgray-", dir="/tmp"))  # Ray's sockets are there: a short name
    cluster = RayCluster(directory, log)
    try:
        for count in num_cpus:
            cluster.add(count)
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            if node.process.poll() is None:
                node.stop()
        shutil.rmtree(directory, ignore_errors=True)


def below(pid: int) -> list[tuple[int, str]]:
    """Process ids and command lines of all descendants, of whatever distance."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, check=True).stdout.decode()
    rows = [line.split(None, 2) for line in lines.splitlines()]
    children: dict[int, list[tuple[int, str]]] = {}
    for row in rows:
        children.setdefault(int(row[1]), []).append((int(row[0]), row[2] if len(row) > 2 else ""))
    found, waiting = [], [pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += [child for child, _ in own]
    return found


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
