"""How fast blocks pass a data link: through memory beside a copy of the same bytes, over TCP beside a bare socket.

All four are measured in turns, and the best of each counts: on a busy machine any of them waits for others.  Blocks
come from a process of their own, each with its checksum, which is checked.  `scripts/bench_moves` runs it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from kernels.cpu.binding.loading import checked_copy
from scripts.bench.common.report import Result
from shared.data_link.addresses import ENDING, TCP, UNIX, listening_at, listening_at_port, prepare
from shared.data_link.client import DataLinks
from shared.data_link.frames import checksum, receive_into
from shared.data_link.server import BlockServer, HeldBlock

NUM_BLOCKS, BLOCK_BYTES = 128, 368_640  # 2,048 tokens of model S in bfloat16
ROUNDS = 40
OF_MEMCPY, OF_SOCKET = 70.0, 60.0  # per cent
SPACE, NAMES = bytes(16), [index.to_bytes(16, "big") for index in range(NUM_BLOCKS)]
HOST = "127.0.0.1"


class SomeBlocks:
    """What is served."""

    def __init__(self) -> None:
        made = (bytearray(os.urandom(BLOCK_BYTES)) for _ in NAMES)
        self.blocks: dict[bytes, HeldBlock] = {
            name: (checksum(block), block) for name, block in zip(NAMES, made, strict=True)
        }

    def keep(self, space: bytes, name: bytes, block: HeldBlock) -> bool:
        return False

    def copy(self, space: bytes, names: Sequence[bytes], block_bytes: int, place: memoryview) -> list[int]:
        for index, name in enumerate(names):
            place[index * block_bytes : (index + 1) * block_bytes] = self.blocks[name][1]
        return [self.blocks[name][0] for name in names]


def serve(path: str, secret: bytes, pipe: Connection) -> None:
    """Until the pipe is closed."""
    held, tcp, bare = SomeBlocks(), listening_at_port(HOST), listening_at_port(HOST)
    server = BlockServer([listening_at(Path(path)), tcp], secret, held)

    def send_on_request() -> None:
        link, _ = bare.accept()
        prepare(link)
        while link.recv(1):
            for _, block in held.blocks.values():
                link.sendall(block)

    threading.Thread(target=send_on_request, daemon=True).start()
    pipe.send((tcp.getsockname()[1], bare.getsockname()[1]))
    pipe.poll(None)
    server.close()


def measure() -> list[Result]:
    places = [memoryview(bytearray(BLOCK_BYTES)) for _ in NAMES]
    others = [os.urandom(BLOCK_BYTES) for _ in NAMES]  # zeros would all be one page, which stays in the cache
    secret, spawn = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"blocks{ENDING}"
        process = spawn.Process(target=serve, args=(str(path), secret, theirs), daemon=True)
        process.start()
        theirs.close()
        tcp_port, bare_port = ours.recv()
        links, bare = DataLinks(Path(folder), copy=checked_copy()), socket.create_connection((HOST, bare_port))
        prepare(bare)

        def copy() -> None:
            for place, other in zip(places, others, strict=True):
                place[:] = other

        def receive_bare() -> None:
            bare.sendall(b"x")
            for place in places:
                receive_into(bare, place)

        def fetch(address: str) -> None:
            if links.get(address, secret, SPACE, NAMES, places) != NUM_BLOCKS:
                raise RuntimeError("a data link has lost blocks")

        ways: dict[str, Callable[[], None]] = {
            "a copy by one thread": copy,
            "shared memory, checked": lambda: fetch(f"{UNIX}{path}"),
            "a bare socket": receive_bare,
            "TCP, checked": lambda: fetch(f"{TCP}{HOST}:{tcp_port}"),
        }
        best, busy = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, math.inf)
        for _ in range(ROUNDS):
            for name, way in ways.items():
                elapsed, computed = seconds(way)
                best[name], busy[name] = min(best[name], elapsed), min(busy[name], computed)
        links.close()
        bare.close()
        ours.close()
        process.join()
    speeds = [NUM_BLOCKS * BLOCK_BYTES / 1e9 / best[name] for name in ways]
    rows = [Result(f"47 MB by {name}", speed, "GB/s") for name, speed in zip(ways, speeds, strict=True)]
    copied, shared, received, over_tcp = speeds
    copied_busy, shared_busy, received_busy, tcp_busy = busy.values()
    return [
        *rows,
        Result("shared memory, of a copy", 100 * shared / copied, "%", at_least=OF_MEMCPY),
        Result("TCP, of a bare socket", 100 * over_tcp / received, "%", at_least=OF_SOCKET),
        Result("shared memory, in processor time of the receiver", 100 * copied_busy / shared_busy, "%"),
        Result("TCP, in processor time of the receiver", 100 * received_busy / tcp_busy, "%"),
    ]


def seconds(way: Callable[[], None]) -> tuple[float, float]:
    """Elapsed, and of this thread's processor time, which other work on the machine changes less."""
    begun, busy = time.perf_counter(), time.thread_time()
    way()
    return time.perf_counter() - begun, time.thread_time() - busy
