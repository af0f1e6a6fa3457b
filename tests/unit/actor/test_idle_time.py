"""Threads that give way, and processes that end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from shared.processes import idle_time
from shared.processes.exit_status import NICENESS
from shared.processes.idle_time import LEAST_URGENT, give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is each thread's own on Linux alone")
END = """
import os, sys, threading, time
from shared.processes import exit_status
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def said(status):
    threads = map(int, os.listdir("/proc/self/task"))
    print(status, *sorted(os.getpriority(os.PRIO_PROCESS, one) for one in threads), flush=True)
    end(status)
end, os._exit = os._exit, said
exit_status.leave(3)
"""


def niceness_after(*steps: int) -> int:
    found: list[int] = []

    def run() -> None:
        for step in steps:
            give_way(step)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_becomes_nicer_than_its_process_and_never_more_than_is_possible() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_after(3) == min(own + 3, LEAST_URGENT)
    assert niceness_after(3, 100) == LEAST_URGENT
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the others have become nicer too"


def test_a_process_that_ends_gives_way_with_all_of_its_threads() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", END], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    nice = min(own + NICENESS, LEAST_URGENT)
    assert (done.returncode, done.stdout.split()) == (3, ["3", str(nice), str(nice)])


def test_a_sandbox_that_allows_no_niceness_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    give_way(3)
    idle_time.give_way_everywhere(3)
