"""What passes between the stages of a pipeline, over sockets.

A frame goes round: from the leader to the first stage, from there through the leader to the next one, and from the
last but one to the leader, which is the last stage.  It is an order, and behind it what the stages so far have made of
it: the residuals of all tokens of a step.  Stages are connected to the leader alone, as ranks are.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from engine.modeling.ranks.step_orders import CopyOrder, LinkEnd, Octets, StepOrder, decoded
from kernels.cpu.binding import abi
from kernels.cpu.binding.ranks import why_ended
from shared.errors import FatalError

_HEAD = struct.Struct("!QQ")  # bytes of the order, and of the rows behind it
NO_ROWS = np.zeros(0, np.uint8)


Order = StepOrder | CopyOrder


class Frame(NamedTuple):
    order: Order
    rows: Octets  # of a step the residuals, [num_tokens, hidden_size] float32; from the leader none


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class StageLink(LinkEnd):
    """One end of a connection: one thread sends, one receives."""

    def send(self, order: Order, rows: Octets = NO_ROWS) -> None:
        """Raises OSError."""
        data = _ENCODER.encode(order)
        self.socket.sendall(_HEAD.pack(len(data), len(rows)) + data)
        if len(rows):
            self.socket.sendall(rows.data)

    def receive(self, token_bytes: int) -> Frame:
        """Of rows with so many bytes each.  Raises OSError where the other end is closed, or says what cannot be."""
        order_bytes, row_bytes = _HEAD.unpack(self.take(_HEAD.size).data)
        order = decoded(_DECODER, self.take_order(order_bytes))
        most = len(order.tokens) // 4 * token_bytes if isinstance(order, StepOrder) else 0
        if row_bytes not in (0, most):
            raise ConnectionError(f"{row_bytes} bytes of rows in the place of {most}")
        return Frame(order, self.take(row_bytes) if row_bytes else NO_ROWS)

    def close(self) -> None:
        """By the thread that receives."""
        self.socket.close()


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
