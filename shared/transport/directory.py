"""The directory of a deployment on one host: private, held by one scheduler, its files known by their inodes."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import IO

from shared.errors import ConfigError
from shared.processes.descriptors import is_exhausted

BACKLOG = 1024
MAX_PATH = 107  # sockaddr_un holds 108 bytes with the final zero
LOCK = "scheduler.lock"


def claim(directory: Path) -> IO[str]:
    """Hold a deployment's directory for its one scheduler, until this file is closed or the process ends.

    A second scheduler would take the socket from the first.  Raises ConfigError where one runs already.
    """
    while True:
        file = (directory / LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"a scheduler runs in {directory} already; give this deployment a runtime_dir of its own"
            ) from error
        if is_at(directory / LOCK, file.fileno()):
            return file
        file.close()  # the directory was replaced in between


def identity(path: Path) -> tuple[int, int] | None:
    """The identity of the file at a path: no other file has it while a process holds this one; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one that is there."""
    status = os.fstat(file)
    return identity(path) == (status.st_dev, status.st_ino)


def listening(path: Path) -> socket.socket:
    """A socket that listens at a path where there is none.  Raises OSError."""
    listener = bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))
    listener.setblocking(False)
    return listener


def bound(listener: socket.socket, place: bytes | str | tuple[str, int]) -> socket.socket:
    """The socket, which listens at this place then.  Raises OSError, and closes it."""
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def answers(path: str | Path) -> bool:
    """Whether a process listens there.  Raises OSError where there is no descriptor to find out with."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # so many want to be let in
            return True
        except OSError as error:
            if is_exhausted(error):
                raise
            return False
        return True


def fits(path: str) -> bool:
    """Whether a socket can have this name."""
    try:
        return len(os.fsencode(path)) <= MAX_PATH and "\0" not in path
    except UnicodeEncodeError:
        return False


def make_private(directory: Path) -> None:
    """Create a directory that only this user can enter.  Raises ConfigError where another user owns it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"runtime_dir {directory} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)
