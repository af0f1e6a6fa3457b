"""What is done of a batch: two files of results, one of answers and one of errors, that only grow by whole lines.

They are all that is known of it.  A gateway that takes a batch over reads them, cuts off a line that was being written
when the one before it died, and goes on with the lines that neither has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from services.gateway.http.batches.objects import LineResult, ResultError, ResultResponse

MARK = "batch_req_"
PLACE_DIGITS = 8


class _Id(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Id)


class Ledger:
    """Each line is in one of the files, once.  Its methods block; threads may call them at a time."""

    def __init__(self, output: Path, errors: Path, batch_id: str, num_lines: int) -> None:
        """Opens the files, or makes them.  Raises OSError."""
        self._name = MARK + batch_id.removeprefix("batch_")
        self._lock = threading.Lock()
        self._done = bytearray(num_lines)
        self._files = [_Results(output), _Results(errors)]
        for file in self._files:
            for index in file.recover(self._place):
                self._done[index] = 1

    @property
    def num_completed(self) -> int:
        return self._files[0].num_lines

    @property
    def num_failed(self) -> int:
        return self._files[1].num_lines

    def is_done(self, index: int) -> bool:
        return bool(self._done[index])

    def unfinished(self) -> Iterator[int]:
        return (index for index, is_done in enumerate(self._done) if not is_done)

    def answered(self, index: int, custom_id: str, response: ResultResponse) -> None:
        """Note an answer; one that is no success is an error.  Raises OSError where it cannot be written."""
        self._note(LineResult(id=self._result_id(index), custom_id=custom_id, response=response), index,
                   is_error=not 200 <= response.status_code < 300)  # fmt: skip

    def given_up(self, index: int, custom_id: str, error: ResultError) -> None:
        """Note that a line has no answer."""
        self._note(LineResult(id=self._result_id(index), custom_id=custom_id, error=error), index, is_error=True)

    def close(self) -> tuple[int, int]:
        """Put all on the disk, and take no more; the bytes of both files."""
        with self._lock:
            for file in self._files:
                file.close()
            return self._files[0].num_bytes, self._files[1].num_bytes

    def _note(self, result: LineResult, index: int, *, is_error: bool) -> None:
        line = msgspec.json.encode(result) + b"\n"
        with self._lock:
            if not self._done[index]:
                self._files[is_error].append(line)
                self._done[index] = 1

    def _result_id(self, index: int) -> str:
        return f"{self._name}{index:0{PLACE_DIGITS}x}"

    def _place(self, line: bytes) -> int | None:
        """The place of the line that a result is of; None where it is no result of this batch."""
        try:
            found = _id.decode(line).id
            index = int(found.removeprefix(self._name), 16)
        except (msgspec.DecodeError, UnicodeError, ValueError):
            return None
        return index if found.startswith(self._name) and index < len(self._done) else None


class _Results:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.num_lines = 0
        self.num_bytes = 0
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def recover(self, place: Callable[[bytes], int | None]) -> Iterator[int]:
        """The places of all whole lines; what follows the last of them is cut off."""
        with self._path.open("rb") as file:
            for line in file:
                index = place(line) if line.endswith(b"\n") else None
                if index is None:
                    break
                self.num_lines += 1
                self.num_bytes += len(line)
                yield index
        os.ftruncate(self._descriptor, self.num_bytes)

    def append(self, line: bytes) -> None:
        if self._descriptor < 0:
            raise OSError("the results of this batch are closed")
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            written = 0
        if written < len(line):  # a full disk takes a part of it
            os.ftruncate(self._descriptor, self.num_bytes)
            raise OSError(f"{self._path.name}: no room for another line")
        self.num_lines += 1
        self.num_bytes += len(line)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
