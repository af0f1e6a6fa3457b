"""`pageant serve` goes on without the processes that fork its services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import Troupe, ask, troupe

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
READY_SECONDS = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("forking"), "--workers", "2") as found:
        yield found


def shared_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Shared_Clean:", "Shared_Dirty:")))


def until_two_workers_serve(running: Troupe) -> None:
    """Two whose process has joined."""
    deadline = time.monotonic() + READY_SECONDS
    while len(running.load().workers) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_services_are_children_of_serve_and_share_what_was_imported(running: Troupe) -> None:
    assert len(running.fork_servers()) == 2
    assert [len(running.pids(service)) for service in SERVICES] == [1, 1, 1, 2, 1]
    found = subprocess.run(["pgrep", "-f", "services.worker"], capture_output=True, check=True).stdout.split()
    assert set(map(int, found)) >= set(running.pids("worker")) and not set(map(int, found)) & set(
        running.fork_servers()
    )
    assert all(shared_bytes(pid) > 50 << 20 for pid in running.pids("worker")), "torch"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_fork_servers_services_go_on_and_are_replaced(running: Troupe, number: signal.Signals) -> None:
    request = ask("Once upon a time", temperature=0.0, max_tokens=60, ignore_eos=True)
    wanted = running.generate([request])[0][0].text
    until_two_workers_serve(running)
    before = {service: running.pids(service) for service in SERVICES}
    servers = running.fork_servers()
    for pid in servers:
        os.kill(pid, number)
    assert running.generate([request])[0][0].text == wanted
    assert {service: running.pids(service) for service in SERVICES} == before
    for service in ("worker", "tokenizer"):
        running.kill(service)
    running.until_serving()
    assert running.generate([request])[0][0].text == wanted
    until_two_workers_serve(running)
    after = running.fork_servers()
    assert len(after) == 2 and not set(after) & set(servers), "others were started when they were needed"
    assert not set(running.pids("worker")) & set(before["worker"])
