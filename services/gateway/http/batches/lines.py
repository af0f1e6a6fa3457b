"""The lines of a batch's input: each is checked once, and read again when its turn comes."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.http.batches.objects import BatchError

MAX_ERRORS = 100  # that a batch tells
MAX_CUSTOM_ID_CHARS = 512
BREATH_LINES, BREATH_SECONDS = 256, 0.002  # the event loop of this process wants its turn too


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Asked(msgspec.Struct):
    stream: Any = None


_line = msgspec.json.Decoder(Line)
_asked = msgspec.json.Decoder(_Asked)


class Lines:
    """Where the lines of a file begin and end; a line is known by its place among those that are not empty."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._begins, self._ends = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int) -> None:
        self._begins.append(begin)
        self._ends.append(end)

    def read(self, index: int) -> Line:
        begin = self._begins[index]
        return _line.decode(os.pread(self._descriptor, self._ends[index] - begin, begin))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_lines(path: Path, endpoint: str, *, max_lines: int, max_bytes: int) -> tuple[Lines, list[BatchError]]:
    """All lines of a file, and what is wrong with them.  Raises OSError.  Blocks."""
    lines, errors, known = Lines(path), list[BatchError](), set[bytes]()
    number = begin = 0
    with path.open("rb") as file:
        while data := file.readline(max_bytes + 1):
            number += 1
            end = begin + len(data)
            if len(data) > max_bytes:
                errors.append(_error("line_too_long", f"has more than max_request_bytes={max_bytes} bytes", number))
                break
            if data.strip():
                if len(lines) == max_lines:
                    errors.append(_error("too_many_tasks", f"the file has more than {max_lines} requests", number))
                    break
                lines.add(begin, end)
                if error := _check(data, endpoint, number, known):
                    errors.append(error)
                    if len(errors) == MAX_ERRORS:
                        break
            begin = end
            if number % BREATH_LINES == 0:
                time.sleep(BREATH_SECONDS)
    if not lines and not errors:
        errors.append(BatchError(code="empty_file", message="the file has no requests"))
    return lines, errors


def _check(data: bytes, endpoint: str, number: int, known: set[bytes]) -> BatchError | None:
    """What is wrong with one line; `known`: digests of the custom ids of those before it."""
    try:
        line = _line.decode(data)
        asked = _asked.decode(line.body)
    except msgspec.ValidationError as error:
        return _error("invalid_request", str(error), number)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return _error("invalid_json_line", f"is not valid JSON: {error}", number)
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        return _error("invalid_custom_id", f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters", number, "custom_id")
    if line.method != "POST":
        return _error("invalid_method", f"must be POST, got {line.method[:32]!r}", number, "method")
    if line.url != endpoint:
        return _error("invalid_url", f"must be the batch's endpoint {endpoint}, got {line.url[:64]!r}", number, "url")
    if asked.stream:
        return _error("invalid_request", "a line of a batch cannot be streamed", number, "body.stream")
    digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in known:
        return _error("duplicate_custom_id", f"{line.custom_id[:64]!r} is in an earlier line too", number, "custom_id")
    known.add(digest)
    return None


def _error(code: str, message: str, number: int, param: str | None = None) -> BatchError:
    return BatchError(code=code, message=f"line {number}: {message}", line=number, param=param)
