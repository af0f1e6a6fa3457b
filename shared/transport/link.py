"""An actor's interface to the network: one inbox, one outbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import structlog

from shared.errors import ProtocolError
from shared.messages import Message, MessageDecoder, encode
from shared.messages.inboxes import from_others

T = TypeVar("T")
log = structlog.get_logger()


class Inbox(Generic[T]):
    """An actor's mailbox: what came over the wire, and what the actor posted to itself, in order of arrival.

    Cancelling `recv_batch` loses nothing: messages stay in the mailbox until a call returns them.
    """

    def __init__(self, address: str, union: Any) -> None:
        self.address = address
        self.num_undecodable = 0
        self._decoder: MessageDecoder[T] = MessageDecoder(from_others(union))
        self._mail: deque[T] = deque()
        self._arrived = asyncio.Event()

    def post(self, message: T) -> None:
        """Put a message to oneself in the mailbox; only from the event loop's own thread."""
        self._mail.append(message)
        self._arrived.set()

    def deliver(self, frames: Sequence[bytes | memoryview]) -> None:
        """Decode and queue what came from the wire.  An undecodable frame costs that frame."""
        for frame in frames:
            try:
                self._mail.append(self._decoder.decode(frame))
            except ProtocolError as error:
                self.num_undecodable += 1
                if worth_a_line(self.num_undecodable):
                    log.warning("message_dropped", reason=str(error), num_undecodable=self.num_undecodable)
        self._arrived.set()

    async def recv_batch(self) -> list[T]:
        """Wait for mail, then take all of it."""
        while not self._mail:
            self._arrived.clear()
            await self._arrived.wait()
        batch = list(self._mail)
        self._mail.clear()
        return batch

    def readdress(self) -> bool:
        """Whether the address has changed since the last call; `address` is the new one."""
        return False

    @property
    def is_cut_off(self) -> bool:
        """Whether, when last looked at, no network led from here to the scheduler's."""
        return False

    def close(self) -> None:
        """Stop receiving and give the address back."""


def worth_a_line(count: int) -> bool:
    """The first, second, fourth, eighth ...: a million bad frames do not fill a disk with log lines."""
    return count & (count - 1) == 0


class Outbox(Protocol):
    """Collects messages; `flush` sends them on, all to one destination at once.

    `on_gone` is called with a destination's address as soon as no process listens there any more, where the transport
    can see that; it must be set before the first flush.
    """

    on_gone: Callable[[str], None] | None

    def send(self, address: str, message: Message) -> None: ...

    def flush(self) -> None: ...

    def forget(self, address: str) -> None:
        """Drop the connection to a destination that has left."""

    def close(self) -> None: ...


class Transport(Protocol):
    """How a process binds its inbox and reaches others."""

    def bind(self, name: str, union: Any) -> Inbox[Any]: ...

    def outbox(self) -> Outbox: ...

    @property
    def scheduler_address(self) -> str: ...

    def keep(self) -> str:
        """Check that the files of this process in the runtime directory are still there; at every tick.

        Missing files are made again, and named; an empty string where none was missing.  Raises ConfigError where the
        directory is another deployment's by now, OSError where nothing can be made in it at present.
        """

    def close(self) -> None: ...


class PendingFrames:
    """Encoded messages by destination, in order, until the flush."""

    def __init__(self) -> None:
        self._frames: dict[str, list[bytes]] = {}

    def add(self, address: str, message: Message) -> None:
        self._frames.setdefault(address, []).append(encode(message))

    def take(self) -> dict[str, list[bytes]]:
        frames, self._frames = self._frames, {}
        return frames

    def drop(self, address: str) -> None:
        self._frames.pop(address, None)
