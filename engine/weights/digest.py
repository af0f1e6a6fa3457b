"""One digest of all that a checkpoint's tensors hold, made while they are loaded and remembered beside the files.

What is remembered is found by the files' identity: place, inode, size, and when content and inode were changed last.
The last of these no program can set, so a file that was replaced or written to is read anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.binding.build import is_private
from kernels.cpu.binding.contents import rows_of
from kernels.ops import digest
from kernels.ops.digest import Sums

RowSums = Callable[[NDArray[np.uint8]], Sums]
Described = tuple[torch.dtype, torch.Size]
DIGEST_BYTES = 16
SMALL = 1 << 14  # bytes of a tensor that cost less to hash as they are than to be summed
SUMS_BYTES = 8 * digest.WORDS
BLOCK = 512  # tensors whose sums lie together
REMEMBERED = 256  # checkpoints, the latest
FORMAT = "4"  # of what is remembered, and of the digest


class Copy(Protocol):
    """Does `out.copy_(source)`, and adds the row sums of what it reads."""

    def __call__(self, source: Tensor, out: Tensor, sums: Sums | None = None) -> Tensor: ...


class WeightDigest:
    """Takes tensors in any order; what it comes to depends on their names, formats, shapes and contents alone.

    The sums of a tensor cost little where it is read anyway: code that packs or copies it asks for `sums` to write
    them, or for a copy.  What is left then is summed by `settle`, or at once by threads of the digest.
    """

    def __init__(self, row_sums: RowSums = digest.row_sums, *, copy: Copy | None = None, threads: int = 0) -> None:
        """`threads` of our own, for sums that take longer than what is done with the tensors meanwhile; 0: none."""
        self._row_sums = row_sums
        self._copy = copy
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest") if threads else None
        self._summed: dict[str, tuple[Described, Future[Sums]]] = {}  # by the pool
        self._hashed: dict[str, tuple[Described, bytes]] = {}  # content or sums
        self._left: dict[str, Tensor] = {}
        self._lent: list[tuple[Sums, int, list[str], list[Described]]] = []  # from which row on others add
        self._block, self._used = np.zeros((BLOCK, digest.WORDS), np.uint64), 0

    def add(self, name: str, tensor: Tensor) -> None:
        """A contiguous tensor as the checkpoint has it; it does not change until `settle`.

        This and `sums` run between weights, whose bytes have driven their code and data out of the caches: each
        does as little as it can.
        """
        if self._pool is not None and tensor.nbytes > SMALL:
            self._summed[name] = _describe(tensor), self._pool.submit(self._sums_of, tensor)
        else:
            self._left[name] = tensor

    def sums(self, *names: str) -> Sums | None:  # [len(names), WORDS]
        """For the tensors' row sums, to which the caller adds before the next `settle`; none: not all are wanted."""
        left = self._left
        taken: list[str] = []
        described: list[Described] = []
        for name in names:
            tensor = left.get(name)
            if tensor is None or name in taken or tensor.nbytes <= SMALL:
                return None
            taken.append(name)
            described.append((tensor.dtype, tensor.shape))
        for name in taken:
            del left[name]
        begin, self._used = self._used, self._used + len(taken)
        if self._used > len(self._block):
            self._block = np.zeros((max(BLOCK, len(taken)), digest.WORDS), np.uint64)
            begin, self._used = 0, len(taken)
        self._lent.append((self._block, begin, taken, described))
        return self._block[begin : self._used]

    def copied(self, name: str, tensor: Tensor, out: Tensor) -> Tensor:
        """Copy a tensor that was added into `out`."""
        return out.copy_(tensor) if self._copy is None else self._copy(tensor, out, self.sums(name))

    def settle(self) -> None:
        """Sum what nothing else did."""
        for name, tensor in self._left.items():
            if tensor.nbytes <= SMALL:
                content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
            else:
                content = self._sums_of(tensor).tobytes()
            self._hashed[name] = _describe(tensor), content
        self._left.clear()

    def _sums_of(self, tensor: Tensor) -> Sums:
        return self._row_sums(rows_of(tensor))

    @property
    def value(self) -> str:
        """Hexadecimal, of all that was added; nothing is added after it."""
        self.settle()
        found = self._hashed | {name: (how, future.result().tobytes()) for name, (how, future) in self._summed.items()}
        for block, begin, names, described in self._lent:
            sums = block[begin : begin + len(names)].tobytes()
            for index, (name, how) in enumerate(zip(names, described, strict=True)):
                found[name] = how, sums[index * SUMS_BYTES : (index + 1) * SUMS_BYTES]
        whole = bytearray()
        for name in sorted(found):
            (dtype, shape), content = found[name]
            whole += f"{len(name)} {name} {dtype} {list(shape)} ".encode()
            whole += content
        if self._pool is not None:
            self._pool.shutdown()
        return hashlib.blake2b(whole, digest_size=DIGEST_BYTES).hexdigest()


def _describe(tensor: Tensor) -> Described:
    return tensor.dtype, tensor.shape


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
        """Looks at the files only where there are too many."""
        too_many = len(os.listdir(self._folder)) - REMEMBERED  # noqa: PTH208 - makes no objects
        if too_many > 0:
            files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:too_many]:
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
