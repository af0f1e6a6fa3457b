"""NIXL's plugin for files as a backend: `nixl://POSIX/DIR`, a directory that stores of several hosts may share.

Each block is a file of its own, named by the block; NIXL moves its bytes.  A file appears whole or not at all.  Nothing
limits the directory: files that were not changed for long may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.store.backends.interface import BackendAddress, BackendError, Value
from shared.errors import ConfigError

PLUGIN = "POSIX"
SECONDS = 2.0  # that one transfer may take
TURN = 0.0002  # seconds between two looks at a transfer


class NixlBackend:
    """One agent of NIXL."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError where the directory cannot be used, and what NIXL raises where it has no such plugin."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._name = f"pageant-{secrets.token_hex(8)}"
        api = library()
        self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=[PLUGIN]))

    def put(self, name: str, parts: Sequence[Value]) -> bool:
        data = bytearray().join(parts)
        path = self._path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}.{self._name}")
        try:
            self._move("WRITE", new, data, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        return True

    def get(self, names: Sequence[str], size: int) -> list[Value | None]:
        values: list[Value | None] = []
        for name in names:
            data = bytearray(size)
            try:
                self._move("READ", self._path(name), data, os.O_RDONLY)
                values.append(data)
            except FileNotFoundError:
                values.append(None)
        return values

    def has(self, names: Sequence[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """The agent ends with what refers to it."""
        del self._agent

    def _path(self, name: str) -> Path:
        return self._directory / name[-2:] / name

    def _move(self, direction: str, path: Path, data: bytearray, flags: int) -> None:
        """Between memory and a file.  Raises OSError, BackendError and what NIXL raises."""
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        descriptor = os.open(path, flags, 0o600)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            here = self._agent.register_memory([(ctypes.addressof(memory), len(data), 0, "")], "DRAM")
            stack.callback(self._agent.deregister_memory, here)
            there = self._agent.register_memory([(0, len(data), descriptor, "")], "FILE")
            stack.callback(self._agent.deregister_memory, there)
            handle = self._agent.initialize_xfer(direction, here.trim(), there.trim(), self._name)
            stack.callback(self._agent.release_xfer_handle, handle)
            state, deadline = self._agent.transfer(handle), time.monotonic() + SECONDS
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(TURN)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise BackendError(f"NIXL did not move a block: {state}")


def nixl_at(plugin: str, directory: str) -> BackendAddress:
    """Raises ConfigError where the address is none, or the package is not installed or cannot be loaded."""
    if plugin != PLUGIN or directory in ("", "/"):
        raise ConfigError(f"store_backend nixl needs a directory, as nixl://{PLUGIN}/mnt/blocks")
    library()
    connect = partial(NixlBackend, Path(directory))
    return BackendAddress(reader=connect, writer=connect)


def library() -> Any:
    """Raises ConfigError."""
    try:
        from nixl import _api
    except ImportError as error:
        raise ConfigError(f"store_backend nixl needs the package of pageant[nixl]: {error}") from error
    return _api
