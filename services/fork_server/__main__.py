"""Run a fork server: python -m services.fork_server SOCKET IMPORTS, a descriptor and a name or a module"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path

import msgspec

from services.fork_server import IMPORTS
from shared.processes.forking import MAX_ORDER, NUM_DESCRIPTORS, ForkOrder

PR_SET_PDEATHSIG = 1
ADOPTION_SECONDS = 5.0
ARGUMENTS = (48, 49)  # fields of /proc/self/stat, counted from 1: where the command line begins and ends


def serve(end: socket.socket) -> ForkOrder | None:
    """Fork for every order, until there are no more; returns the order in a process that has been forked."""
    while True:
        try:
            words, descriptors, _, _ = socket.recv_fds(end, MAX_ORDER, NUM_DESCRIPTORS)
        except OSError:
            return None
        if not words:
            return None
        order = msgspec.json.decode(words, type=ForkOrder)
        if forked():
            become(order, *descriptors)
            return order
        for descriptor in descriptors:
            os.close(descriptor)


def forked() -> bool:
    """Whether this is the new process.  Where there can be none, the supervisor sees that its socket is closed."""
    try:
        # A fork copies one thread, and locks that others may hold.
        return len(list(Path("/proc/self/task").iterdir())) == 1 and fork_twice()
    except OSError:
        return False


def fork_twice() -> bool:
    """Whether this is the second process.  Raises OSError, in the first process alone."""
    if middle := os.fork():
        os.waitpid(middle, 0)
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return True


def become(order: ForkOrder, answer: int, out: int, err: int) -> None:
    """A child of the supervisor that dies with it, with its own process group, output and command line."""
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != order.supervisor and time.monotonic() < deadline:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != order.supervisor:  # it has died
        os._exit(1)
    os.setpgid(0, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    with socket.socket(fileno=answer) as to_supervisor:
        try:
            to_supervisor.send(str(os.getpid()).encode())
        except OSError:  # it has been told to end, before it began
            os._exit(1)
    os.close(out)
    os.close(err)
    os.environ |= order.environment
    rename(order.program)


def rename(program: str) -> None:
    """Show the command line that starts this program, instead of the fork server's, which is longer."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - 3]) for number in ARGUMENTS)  # the third is the first after the name
    words = "\0".join([sys.executable, "-m", program]).encode()
    if len(words) < end - start:
        ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


def main() -> int:
    end = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # collections amid imports are a sixth of their time, and find nothing
    try:
        import_module(IMPORTS.get(sys.argv[2], sys.argv[2]))
    except Exception:
        return 1  # a service that is started in the usual way will say it
    gc.collect()
    gc.freeze()  # collections would write to pages that are shared
    gc.enable()
    order = serve(end)
    end.close()
    if order is not None:
        sys.argv = [order.program]
        runpy.run_module(order.program, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
