"""What passes between the stages of a pipeline, over sockets.

A frame goes round: from the leader to the first stage, from there through the leader to the next one, and from the
last but one to the leader, which is the last stage.  It is an order, and behind it what the stages so far have made of
it: the residuals of all tokens of a step.  Stages are connected to the leader alone, as ranks are.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.modeling.step_orders import CopyOrder, StepOrder
from kernels.cpu import abi
from kernels.cpu.ranks import why_ended
from shared.errors import FatalError

MOST_ORDER = 1 << 28  # bytes
_HEAD = struct.Struct("!QQ")  # bytes of the order, and of the rows behind it
Octets = NDArray[np.uint8]
NO_ROWS = np.zeros(0, np.uint8)


Order = StepOrder | CopyOrder


class Frame(NamedTuple):
    order: Order
    rows: Octets  # of a step the residuals, [num_tokens, hidden_size] float32; from the leader none


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Order)


class StageLink:
    """One end of a connection: one thread sends, one receives."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays open as long as its owner has it open."""
        self._end = socket.socket(fileno=os.dup(descriptor))
        self._end.settimeout(None)

    def send(self, order: Order, rows: Octets = NO_ROWS) -> None:
        """Raises OSError."""
        data = _ENCODER.encode(order)
        self._end.sendall(_HEAD.pack(len(data), len(rows)) + data)
        if len(rows):
            self._end.sendall(rows.data)

    def receive(self, token_bytes: int) -> Frame:
        """Of rows with so many bytes each.  Raises OSError where the other end is closed, or says what cannot be."""
        order_bytes, row_bytes = _HEAD.unpack(self._take(_HEAD.size).data)
        if order_bytes > MOST_ORDER:
            raise ConnectionError(f"an order of {order_bytes} bytes, more than {MOST_ORDER}")
        try:
            order: Order = _DECODER.decode(self._take(order_bytes).data)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"what is no order: {error}") from error
        most = len(order.tokens) // 4 * token_bytes if isinstance(order, StepOrder) else 0
        if row_bytes not in (0, most):
            raise ConnectionError(f"{row_bytes} bytes of rows in the place of {most}")
        return Frame(order, self._take(row_bytes) if row_bytes else NO_ROWS)

    def hang_up(self) -> None:
        """From any thread: one that waits here goes on at once, with an error."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that receives."""
        self._end.close()

    def _take(self, size: int) -> Octets:
        taken, got = np.empty(size, np.uint8), 0
        while got < size:
            count = self._end.recv_into(taken.data[got:])
            if not count:
                raise ConnectionError("its connection is closed")
            got += count
        return taken


class StageRing:
    """The leader's end.  Threads read what stages send, so that none of them ever waits for the leader to read."""

    def __init__(self, links: Sequence[int], token_bytes: int) -> None:
        """`links`: descriptors of sockets to the stages before the last, in order."""
        self.waited = 0.0  # seconds
        self._links = [StageLink(one) for one in links]
        self._arrived: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._ended = abi.ALIVE
        for index in range(len(self._links)):
            arguments = index, token_bytes
            threading.Thread(target=self._read, args=arguments, name=f"stage {index}", daemon=True).start()

    def send(self, order: Order) -> None:
        """To the first stage.  Raises FatalError once the group has ended."""
        try:
            self._links[0].send(order)
        except OSError:
            self.end(abi.RANK_DIED)
        self.check()

    def take(self) -> Frame:
        """What has gone through all stages before the last, in order.  Raises FatalError once the group has ended."""
        begun = time.perf_counter()
        frame = self._arrived.get()
        self.waited += time.perf_counter() - begun
        self.check()
        assert frame is not None
        return frame

    def check(self) -> None:
        if why := why_ended(self._ended):
            raise FatalError(f"the group of ranks has ended: {why}")

    def end(self, reason: int) -> None:
        """From any thread; the first reason stays."""
        self._ended = self._ended or reason
        for link in self._links:
            link.hang_up()
        self._arrived.put(None)

    def _read(self, index: int, token_bytes: int) -> None:
        try:
            while True:
                frame = self._links[index].receive(token_bytes)
                if index + 1 < len(self._links):
                    self._links[index + 1].send(*frame)
                else:
                    self._arrived.put(frame)
        except OSError:
            self.end(abi.RANK_DIED)
        finally:
            self._links[index].close()
