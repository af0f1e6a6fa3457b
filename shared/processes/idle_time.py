"""Work that gives way to other work on its core, in part or wholly."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

LEAST_URGENT = 19  # niceness


def give_way(niceness: int) -> None:
    """The calling thread is nicer by so much from now on: it has a smaller share of a core than threads that want it
    too.  Only on Linux, where niceness is each thread's own."""
    if sys.platform == "linux":
        _become_nicer(threading.get_native_id(), niceness)


def give_way_everywhere(niceness: int) -> None:
    """The same for each thread that the process has now."""
    if sys.platform == "linux":
        for thread in Path("/proc/self/task").iterdir():
            _become_nicer(int(thread.name), niceness)


def _become_nicer(thread: int, niceness: int) -> None:
    with contextlib.suppress(OSError):  # it is over, or a sandbox allows no such call: the work is done all the same
        wanted = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, min(wanted, LEAST_URGENT))  # to become less nice is not allowed


def take_idle_time_only() -> None:
    """The calling thread gives way to every other from now on, at once and for good.  Only on Linux.

    The least niceness is not enough: a nice thread still ends its time slice of some milliseconds while others wait.
    """
    if sys.platform == "linux":
        confine_to_idle_time(threading.get_native_id())


def confine_to_idle_time(pid: int) -> None:
    """The same for another process of ours that has one thread, such as a child that was just started.  Only on Linux.
    Raises OSError where it is gone."""
    if sys.platform != "linux":
        return
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # a sandbox that knows no such call, or does not allow it
        os.setpriority(os.PRIO_PROCESS, pid, LEAST_URGENT)
