"""Messages between a rank and its leader over a stream socket, and signs of life while there are none.

A frame is its length, 4 bytes big-endian, and a msgpack message.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shared.errors import FatalError

BEAT = 0.25  # seconds between signs of life
SILENCE = 2.0  # seconds without one, after which the other end is given up: frozen, or cut off
MOST_BYTES = 1 << 16  # of a message

_LENGTH = struct.Struct("!I")

Answer = TypeVar("Answer", bound=msgspec.Struct)


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A process that has nothing else to say is there."""


class SilentRankError(FatalError):
    """The other end is connected, but has said nothing for too long: its process or its host stands still."""


class Silence:
    """Adds up for how long nothing has come.

    A listener that stood still itself has heard nothing meanwhile: one wait counts for two beats at most.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._seconds = 0.0

    def hear(self) -> None:
        self._seconds = 0.0

    def wait(self, seconds: float) -> bool:
        """So long nothing came; returns whether that is too long."""
        self._seconds += min(seconds, 2 * BEAT)
        return self._seconds >= self.limit


class Channel:
    """One thread receives; any may send."""

    def __init__(self, end: socket.socket, name: str = "a rank", clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: of the other end, for errors."""
        end.settimeout(None)
        self.name = name
        self._end = end
        self._clock = clock
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._received = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Raises FatalError where the other end is closed."""
        data = msgspec.msgpack.encode(message)
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise FatalError(f"{self.name} of the group has ended: {error}") from error

    def receive(self, *kinds: type[Answer], patience: float = math.inf) -> Answer:
        """The next message that is more than a sign of life.

        Raises FatalError where the other end is closed or says something else, and SilentRankError where it says
        nothing for `patience` seconds.
        """
        wanted: Any = Alive
        for kind in kinds:
            wanted = wanted | kind
        silence = Silence(patience)
        while True:
            data = self._frame(silence)
            try:
                message: Any = msgspec.msgpack.decode(data, type=wanted)
            except msgspec.DecodeError as error:
                names = " or ".join(kind.__name__ for kind in kinds)
                raise FatalError(f"{self.name} of the group sent what is no {names}: {error}") from error
            if not isinstance(message, Alive):
                answer: Answer = message
                return answer

    def watch(self, patience: float) -> FatalError:
        """Returns once the other end is closed, or silent for so long: why."""
        try:
            self.receive(Alive, patience=patience)
        except FatalError as error:
            return error
        raise AssertionError("signs of life alone are no message")

    def beat(self) -> None:
        """Show signs of life from now on, in a thread, until either end is closed."""
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def is_ended(self) -> bool:
        """Whether the other end is closed, although there may be something to receive."""
        poller = select.poll()
        poller.register(self._end, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """A thread that receives here goes on at once, with an error."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _beat(self) -> None:
        with contextlib.suppress(FatalError):
            while not self._closed.wait(BEAT):
                self.send(Alive())

    def _frame(self, silence: Silence) -> bytes:
        length = _LENGTH.unpack(self._take(_LENGTH.size, silence))[0]
        if length > MOST_BYTES:
            raise FatalError(f"{self.name} of the group sent a message of {length} bytes, more than {MOST_BYTES}")
        return self._take(length, silence)

    def _take(self, size: int, silence: Silence) -> bytes:
        while len(self._received) < size:
            try:
                poller = select.poll()
                poller.register(self._end, select.POLLIN)
                begun = self._clock()
                if poller.poll(1000 * BEAT):
                    self._received += self._piece()
                    silence.hear()
                elif silence.wait(self._clock() - begun):
                    raise SilentRankError(f"{self.name} of the group has been silent for {silence.limit:g} s")
            except (OSError, ValueError) as error:  # ValueError: this end is closed
                raise FatalError(f"{self.name} of the group has ended: {error}") from error
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _piece(self) -> bytes:
        if not (data := self._end.recv(MOST_BYTES)):
            raise ConnectionError("its connection is closed")
        return data
