"""Responses that are kept for `previous_response_id` and GET: a file each, so that any gateway of the host, and a later
one, finds them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from pathlib import Path

import msgspec

from services.gateway.http.responses.inputs import InputItem

SWEEP_SECONDS = 10.0  # between two looks for files that are too old or too many
SUFFIX = ".json"


class StoredResponse(msgspec.Struct):
    """A response as its client has it, and what it was made from."""

    response: msgspec.Raw
    before: list[InputItem]  # of the responses that it went on from
    input: list[InputItem]

    @property
    def conversation(self) -> list[InputItem]:
        """All that a response that goes on from this one begins with."""
        output = msgspec.json.decode(self.response, type=_Output).output
        return [*self.before, *self.input, *output]


class _Output(msgspec.Struct):
    output: list[InputItem]


_decoder = msgspec.json.Decoder(StoredResponse)


class ResponseStore:
    """Keeps records for `seconds`, and the newest `max_bytes` of them.  All of it blocks, and is called from threads.

    A tenant finds its own only: its name is part of each file's.
    """

    def __init__(self, directory: Path, seconds: float, max_bytes: int) -> None:
        self._directory = directory
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._swept = 0.0

    @property
    def keeps(self) -> bool:
        return self._seconds > 0 and self._max_bytes > 0

    def _path(self, tenant: str, response_id: str) -> Path:
        key = f"{tenant}\0{response_id}".encode("utf-8", "surrogatepass")
        return self._directory / (hashlib.blake2b(key, digest_size=20).hexdigest() + SUFFIX)

    def put(self, tenant: str, response_id: str, record: StoredResponse) -> None:
        """Raises OSError where it cannot be written."""
        path = self._path(tenant, response_id)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = path.with_name(f".{uuid.uuid4().hex}")
        try:
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(record))
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
        self._sweep()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        path = self._path(tenant, response_id)
        try:
            if path.stat().st_mtime < time.time() - self._seconds:
                return None
            return _decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        try:
            self._path(tenant, response_id).unlink()
        except OSError:
            return False
        return True

    def _sweep(self) -> None:
        """Remove what is too old, and the oldest of what is too much; other gateways may do the same meanwhile."""
        now = time.time()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        found = []
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        room = self._max_bytes
        for changed, size, path in sorted(found, reverse=True):
            room -= size
            if room < 0 or changed < now - self._seconds:
                path.unlink(missing_ok=True)
