"""The kinds of addresses: how a socket is bound and connected, and which addresses are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import zmq

from shared.transport.inbox import ZmqInbox

SCHEDULER = "scheduler"


class Addresses(Protocol):
    """One kind of addresses, as one process uses it."""

    scheduler: str
    return_seconds: float  # in which ZeroMQ reaches a process again that has only lost a connection

    @property
    def is_vacant(self) -> Callable[[str], bool] | None:
        """Whether it is certain that no process listens at an address; None where that cannot be seen."""

    def bind(self, name: str, union: Any, socket: zmq.Socket[bytes]) -> ZmqInbox: ...

    def objection(self, address: str) -> str:
        """Why an address that came in a message is refused; empty where it is accepted."""

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Set what a socket needs before it connects."""

    def keep(self) -> str:
        """`Transport.keep`."""

    def close(self) -> None: ...
