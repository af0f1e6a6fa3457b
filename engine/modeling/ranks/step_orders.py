"""What a leader orders from the processes that compute a step with it, stages and ranks that compute with torch; and
the ends of the sockets that orders pass."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.modeling.batch import Ints, StepBatch
from kernels.ops.steps.transfer import to_device

MOST_ORDER = 1 << 28  # bytes

Octets = NDArray[np.uint8]
OrderKind = TypeVar("OrderKind")


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step that all compute their part of."""

    number: int
    computed: bytes  # [num_seqs] int64
    scheduled: bytes  # [num_seqs] int64
    tokens: bytes  # [num_tokens] int32
    tables: bytes  # [num_seqs, num_pools, used] int32
    used: int  # blocks of the longest sequence
    seconds: list[float] = []  # that the stages so far have computed


class CopyOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that all copy in their layers, before the steps behind it."""

    number: int
    pool: int
    copies: list[tuple[int, int]]  # (source, destination)


class HeadOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows of hidden states that ranks compute their part of the head for."""

    number: int
    num_rows: int
    is_greedy: bool  # the most likely tokens are wanted, not the logits


def order_step(number: int, batch: StepBatch, num_pools: int) -> StepOrder:
    lengths, positions = batch.computed + batch.scheduled, positions_of(batch.computed, batch.scheduled)
    tokens = _read(batch.tokens, np.repeat(batch.rows, batch.scheduled), positions)
    used = -(-int(lengths.max()) // batch.block_size)
    tables = batch.block_tables[batch.rows].reshape(len(batch.rows), num_pools, -1)[:, :, :used]
    return StepOrder(
        number,
        batch.computed.tobytes(),
        batch.scheduled.tobytes(),
        tokens.astype(np.int32).tobytes(),
        tables.astype(np.int32).tobytes(),
        used,
    )


def positions_of(computed: Ints, scheduled: Ints) -> Ints:  # [num_seqs] both -> [num_tokens]
    firsts = np.cumsum(scheduled) - scheduled
    return np.repeat(computed - firsts, scheduled) + np.arange(int(scheduled.sum()))


class OrderedBatches:
    """Makes batches of the steps that are ordered, in tables of its own."""

    def __init__(self, max_seqs: int, longest: int, device: torch.device) -> None:
        """For steps of up to so many sequences of up to `longest` tokens."""
        self._tokens = torch.zeros(max_seqs, longest, dtype=torch.int64, device=device)
        self._tables = np.zeros((max_seqs, 0), np.int64)
        self._block_size, self._num_pools = 0, 0

    def allocate(self, block_size: int, num_pools: int) -> None:
        width = -(-self._tokens.shape[1] // block_size) * num_pools
        self._tables = np.zeros((len(self._tokens), width), np.int64)
        self._block_size, self._num_pools = block_size, num_pools

    def read(self, order: StepOrder) -> StepBatch:
        """All hidden states are wanted; it holds until the next one is read."""
        computed, scheduled = (np.frombuffer(column, np.int64) for column in (order.computed, order.scheduled))
        rows, pools = np.arange(len(computed)), self._num_pools
        tokens = np.frombuffer(order.tokens, np.int32).astype(np.int64)
        _write(self._tokens, np.repeat(rows, scheduled), positions_of(computed, scheduled), tokens)
        tables = np.frombuffer(order.tables, np.int32).reshape(len(rows), pools, order.used)
        self._tables.reshape(len(self._tables), pools, -1)[: len(rows), :, : order.used] = tables
        return StepBatch(rows, computed, scheduled, scheduled, self._tokens, self._tables, self._block_size)


class LinkEnd:
    """One end of a socket.  One thread sends and one receives; any may hang up."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays open as long as its owner has it open."""
        self.socket = socket.socket(fileno=os.dup(descriptor))
        self.socket.settimeout(None)

    def __del__(self) -> None:
        """Not earlier: a thread that waits here would read what gets the descriptor next."""
        self.socket.close()

    def take(self, size: int) -> Octets:
        """So many bytes.  Raises OSError where the other end is closed."""
        taken, got = np.empty(size, np.uint8), 0
        while got < size:
            count = self.socket.recv_into(taken.data[got:])
            if not count:
                raise ConnectionError("its connection is closed")
            got += count
        return taken

    def take_order(self, size: int) -> bytes:
        """Raises OSError also where it is larger than orders are."""
        if size > MOST_ORDER:
            raise ConnectionError(f"an order of {size} bytes, more than {MOST_ORDER}")
        return self.take(size).tobytes()

    def hang_up(self) -> None:
        """From any thread: one that waits at either end goes on at once, with an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def decoded(decoder: msgspec.msgpack.Decoder[OrderKind], data: bytes) -> OrderKind:
    """Raises OSError for what is no order."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"what is no order: {error}") from error


def _read(tokens: Tensor, rows: Ints, positions: Ints) -> Ints:
    """On a GPU this waits for what was sampled last."""
    if tokens.device.type == "cpu":
        found: Ints = tokens.numpy()[rows, positions]
        return found
    where = to_device(np.stack((rows, positions)), tokens.device)
    found = tokens[where[0], where[1]].cpu().numpy()
    return found


def _write(tokens: Tensor, rows: Ints, positions: Ints, values: Ints) -> None:
    if tokens.device.type == "cpu":
        tokens.numpy()[rows, positions] = values
        return
    where = to_device(np.stack((rows, positions, values)), tokens.device)
    tokens[where[0], where[1]] = where[2]
