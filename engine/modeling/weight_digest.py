"""One digest of all that a checkpoint's tensors hold, made while they are loaded and remembered beside the files.

What is remembered is found by the files' identity: place, inode, size, and when content and inode were changed last.
The last of these no program can set, so a file that was replaced or written to is read anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.build import is_private
from kernels.ops import digest

ChunkSums = Callable[[NDArray[np.uint8]], NDArray[np.uint64]]
DIGEST_BYTES = 16
REMEMBERED = 256  # checkpoints, the latest
FORMAT = "1"  # of what is remembered, and of the digest


class WeightDigest:
    """Takes tensors in any order; what it comes to depends on their names, formats, shapes and contents alone."""

    def __init__(self, chunk_sums: ChunkSums = digest.chunk_sums, *, threads: int = 0) -> None:
        """`threads` of our own, for sums that take longer than what is done with the tensors meanwhile; 0: none."""
        self._chunk_sums = chunk_sums
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest") if threads else None
        self._tensors: dict[str, Future[bytes]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A contiguous tensor as the checkpoint has it; it is not changed."""
        if self._pool is not None:
            self._tensors[name] = self._pool.submit(self._digest_of, tensor)
        else:
            done: Future[bytes] = Future()
            done.set_result(self._digest_of(tensor))
            self._tensors[name] = done

    def _digest_of(self, tensor: Tensor) -> bytes:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        described = f"{tensor.dtype} {list(tensor.shape)} ".encode()
        return hashlib.blake2b(described + self._chunk_sums(content).tobytes()).digest()

    @property
    def value(self) -> str:
        """Hexadecimal, of all that was added; nothing is added after it."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, one in sorted(self._tensors.items()):
            whole.update(f"{len(name)} {name}".encode() + one.result())
        if self._pool is not None:
            self._pool.shutdown()
        return whole.hexdigest()


class DigestMemory:
    """A folder with a small file for each checkpoint; where it cannot be had, nothing is remembered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, identity: str) -> str:
        """The digest of the files with this identity; empty where it is not known."""
        try:
            known = (self._folder / identity).read_text(encoding="ascii").strip()
            usable = is_private(self._folder) and len(known) == 2 * DIGEST_BYTES
        except (OSError, ValueError):
            return ""
        return known if usable and set(known) <= set("0123456789abcdef") else ""

    def remember(self, identity: str, value: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(self._folder):
                return
            handle, partial = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(f"{value}\n")
            Path(partial).replace(self._folder / identity)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(0, len(files) - REMEMBERED)]:
            path.unlink(missing_ok=True)


def user_memory() -> DigestMemory:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - raises nothing
    return DigestMemory(Path(base) / "pageant" / "weights")


def identity_of(files: Iterable[Path]) -> str:
    """Of files that hold a checkpoint: another one as soon as any of them may be another."""
    known = hashlib.blake2b(FORMAT.encode(), digest_size=DIGEST_BYTES)
    for path in sorted(file.resolve() for file in files):
        status = path.stat()
        marks = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        known.update(repr((str(path), *marks)).encode())
    return known.hexdigest()
