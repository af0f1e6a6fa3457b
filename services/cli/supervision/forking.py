"""Services that are forked, not started, by processes that have imported already what takes long
(`services.fork_server`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from services.cli.supervision.supervisor import Process
from shared.processes.forking import MAX_ORDER, ForkOrder

PROGRAM = "services.fork_server"
COMMON, WITH_TORCH = "common", "torch"  # what the two import, as `services.fork_server` calls it
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy starts others at its import, and what has threads cannot fork safely
PR_SET_CHILD_SUBREAPER = 36
MAX_PID = 32  # bytes
PATIENCE = 120.0  # seconds that a fork server has for its imports, and for a fork

Start = Callable[[list[str], Mapping[str, str], tuple[int, ...]], subprocess.Popen[bytes]]


class ForkServers:
    """They begin at once, so that they import while their supervisor still looks at the settings."""

    def __init__(self, start: Start) -> None:
        """`start`: a command with an environment and descriptors that it inherits."""
        adoption = Adoption()
        self.with_torch = ForkServer(WITH_TORCH, start, adoption)  # the one that takes longest is the first
        self.common = ForkServer(COMMON, start, adoption)

    def close(self) -> None:
        """They end; what they have forked goes on."""
        self.with_torch.close()
        self.common.close()


class ForkServer:
    """A process that forks services, and another one where it has ended.

    Where it cannot be had (no Linux, it makes threads, it does not answer), services are started in the usual way.
    """

    def __init__(self, imports: str, start: Start, adoption: Adoption) -> None:
        """`imports`: a name that it knows, or a module."""
        self._imports = imports
        self._start = start
        self._adoption = adoption
        self._end: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    def fork(
        self, program: str, environment: Mapping[str, str], out: int, err: int, otherwise: Callable[[], Process]
    ) -> Process:
        """The process that will run this program, with these variables beside our own and this output; `otherwise`:
        starts it, where it cannot be forked.  Raises OSError as that does."""
        if self._process is None or self._process.poll() is not None:
            self._begin()
        order = msgspec.json.encode(ForkOrder(program, dict(environment), os.getpid()))
        if self._end is None or len(order) > MAX_ORDER:
            return otherwise()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._adoption.count(1)  # first: what it forks may look for its new parent before this call returns
        with theirs:
            try:
                socket.send_fds(self._end, [order], [theirs.fileno(), out, err])
            except OSError:
                ours.close()
                self._adoption.count(-1)
                return otherwise()
        return ForkedProcess(ours, self._adoption, otherwise, self.close)

    def close(self) -> None:
        """It ends; what it has forked goes on."""
        if self._end is not None:
            self._end.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._end = self._process = None

    def _begin(self) -> None:
        self.close()
        if sys.platform != "linux":
            return
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), self._imports]
            try:
                self._process = self._start(command, ONE_THREAD | os.environ, (theirs.fileno(),))
            except OSError:  # no process to be had: services will say so
                self.close()


class Adoption:
    """While a child is awaited, this process is the parent of those below it whose own has ended."""

    def __init__(self) -> None:
        self._num_awaited = 0

    def count(self, change: int) -> None:
        """One more is awaited, or one less: a rank whose leader has died later is not ours, and nothing here would ask
        for its status."""
        self._num_awaited += change
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(self._num_awaited > 0))


class ForkedProcess:
    """A process that was ordered from the fork server, from the order on."""

    def __init__(
        self,
        answer: socket.socket,
        adoption: Adoption,
        otherwise: Callable[[], Process],
        on_silence: Callable[[], None],
    ) -> None:
        """`answer`: where it says its process id; `adoption`: in which it is counted; `otherwise`: starts it, where the
        socket is closed instead; `on_silence`: called where nothing comes."""
        self._answer = answer
        self._adoption = adoption
        self._otherwise = otherwise
        self._on_silence = on_silence
        self._deadline = time.monotonic() + PATIENCE
        self._known: Process | None = None
        self._status: int | None = None  # of one that has ended before it was known
        answer.setblocking(False)

    @property
    def pid(self) -> int:
        """0 while it has none."""
        return getattr(self._known, "pid", 0)

    def poll(self) -> int | None:
        if self._known is None and self._status is None:
            self._hear()
        return self._status if self._known is None else self._known.poll()

    def send_signal(self, number: int, /) -> None:
        if self.poll() is not None:
            return
        if self._known is not None:
            self._known.send_signal(number)
        else:
            self._end_waiting(-number)  # without the socket no process begins

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hear(self) -> None:
        try:
            words = self._answer.recv(MAX_PID)
        except BlockingIOError:
            if time.monotonic() < self._deadline:
                return
            self._on_silence()
            words = b""
        except OSError:
            words = b""
        self._end_waiting(None)
        try:
            self._known = OwnChild(int(words)) if words else self._otherwise()
        except OSError:  # it cannot be started either: as if it had ended at once
            self._status = 1

    def _end_waiting(self, status: int | None) -> None:
        self._answer.close()
        self._adoption.count(-1)
        self._status = status


class OwnChild:
    """A child of this process that was not started by it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for the signal that ended it, or None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # this process ignores SIGCHLD, so the kernel has dropped the status
                pid, status = self.pid, 0
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
