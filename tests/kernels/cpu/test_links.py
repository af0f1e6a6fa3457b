"""Frames between ranks that share no memory: what is none ends the group, and writes nothing beside the areas."""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct

import pytest
import torch

from kernels.cpu.binding import abi
from tests.kernels.cpu.natives import load_build

HIDDEN, AREAS = 64, 8192
SIZES = {"attended": HIDDEN, "inner": HIDDEN, "vocab": 32, "max_tokens": 4, "max_seqs": 4, "max_rows": 4}


def frame(
    *stretches: tuple[int, int, int, int],
    data: bytes = b"",
    kind: int = 0,
    digest: int = 0,
    number: int = 1,
    more: int = 0,
) -> bytes:
    head = struct.pack("=3q2Q2q", kind, 0, 0, digest, number, len(stretches), len(data) + more)
    return head + b"".join(struct.pack("=4q", *one) for one in stretches) + data


def received(data: bytes) -> tuple[str, bytes]:
    """Why the group of a leader has ended that got this of its one rank, and its memory then."""
    native = load_build("native")
    group = abi.PgGroup(ranks=2, spins=60, table_columns=4, **SIZES)
    group.bytes = native.group_bytes(group, HIDDEN)
    memory = mmap.mmap(-1, group.bytes)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    group.memory = view.data_ptr()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        group.links = (ctypes.c_int32 * 1)(ours.fileno())
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        native.gather(group, HIDDEN, 64, 1)
        return native.why_ended(group), bytes(memory)


def test_a_frame_is_written_where_it_says() -> None:
    first = frame((AREAS + 64, 2, 32, 4), data=b"leftmost"[:8])
    why, memory = received(first)
    assert why == "a rank has ended", "it has closed its end behind that"
    assert memory[AREAS + 64 :][:4] == b"left" and memory[AREAS + 96 :][:4] == b"most"
    assert received(first + frame((AREAS, 1, 0, 4), data=b"next", number=2))[0] == ""


@pytest.mark.parametrize(
    "wrong",
    [
        frame((AREAS - 4, 1, 0, 4), data=b"here"),
        frame((1 << 62, 1, 0, 4), data=b"here"),
        frame((AREAS, 2, 1 << 62, 2), data=b"here"),
        frame((AREAS, 1 << 62, 4, 4), data=b"here"),
        frame((AREAS, 1, 0, -4), data=b"here"),
        frame((AREAS, 2, 8, 4), data=b"here"),
        frame((AREAS, 1, 0, 4), data=b"here", kind=1),
        frame((AREAS, 1, 0, 4), data=b"here", digest=1),
        frame((AREAS, 1, 0, 4), data=b"here", number=2),
        frame(data=b"here", more=1 << 62),
        b"\xff" * 100,
    ],
    ids=["before", "behind", "stride", "count", "width", "longer", "order", "digest", "number", "size", "noise"],
)
def test_what_is_no_frame_ends_the_group(wrong: bytes) -> None:
    why, memory = received(wrong)
    assert why == "its ranks read different steps"
    assert b"here" not in memory


def test_a_lost_connection_ends_the_group() -> None:
    assert received(frame((AREAS, 1, 0, 4), data=b"here")[:-2])[0] == "a rank has ended"
