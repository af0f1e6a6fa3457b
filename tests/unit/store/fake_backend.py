"""A backend in this process, which does what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from services.store.backends.interface import BackendAddress, Value


class FakeSystem:
    """What the connections of all stores share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.room = 1 << 20  # values
        self.is_there = True
        self.is_open = threading.Event()  # cleared: every call takes as long as that
        self.is_open.set()
        self.distort: Callable[[str, bytes], bytes] = lambda name, value: value
        self.calls: list[str] = []

    @property
    def address(self) -> BackendAddress:
        return BackendAddress(reader=self.connect, writer=self.connect)

    def connect(self) -> FakeBackend:
        if not self.is_there:
            raise ConnectionRefusedError("nothing listens")
        return FakeBackend(self)


class FakeBackend:
    def __init__(self, system: FakeSystem) -> None:
        self._system = system

    def _called(self, what: str) -> dict[str, bytes]:
        self._system.calls.append(what)
        self._system.is_open.wait(20)
        if not self._system.is_there:
            raise RuntimeError("as a foreign library says that nothing is there")
        return self._system.values

    def put(self, name: str, parts: Sequence[Value]) -> bool:
        values = self._called("put")
        if len(values) >= self._system.room:
            return False
        values.setdefault(name, b"".join(parts))
        return True

    def get(self, names: Sequence[str], size: int) -> list[Value | None]:
        values, distort = self._called("get"), self._system.distort
        return [distort(name, values[name]) if name in values else None for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        values = self._called("has")
        return [name in values for name in names]

    def drop(self, name: str) -> None:
        self._called("drop").pop(name, None)

    def close(self) -> None:
        self._system.calls.append("close")
