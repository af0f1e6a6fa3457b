"""A folder of JSON records under random names that sort by age; each is whole, or not there."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from shared.errors import RejectCode, RequestError

T = TypeVar("T", bound=msgspec.Struct)

SUFFIX = ".json"
HEX = re.compile(r"[0-9a-f]{32}")
RANDOM_BYTES = 10  # of a name, behind 12 hex digits of milliseconds: no other tenant could guess it


def new_id(prefix: str, now: float) -> str:
    return f"{prefix}{int(1000 * now):012x}{secrets.token_hex(RANDOM_BYTES)}"


def is_id(prefix: str, text: str) -> bool:
    """Whether a text may be an id: what else a client sends is no part of a path."""
    return text.startswith(prefix) and HEX.fullmatch(text, len(prefix)) is not None


def write_whole(path: Path, data: bytes) -> None:
    """The file has all of `data`, or what it had, whenever the process or the machine ends."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


class Records(Generic[T]):
    """Records of one kind of one tenant.  Blocks: not for the event loop."""

    def __init__(self, folder: Path, kind: type[T], prefix: str) -> None:
        self.folder = folder
        self._kind = kind
        self._prefix = prefix

    def ids(self) -> list[str]:
        """From the oldest to the newest."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return sorted(name for name in found if is_id(self._prefix, name))

    def read(self, record_id: str) -> T | None:
        if not is_id(self._prefix, record_id):
            return None
        try:
            data = self._path(record_id).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=self._kind)

    def write(self, record_id: str, record: T) -> None:
        write_whole(self._path(record_id), msgspec.json.encode(record))

    def remove(self, record_id: str) -> None:
        self._path(record_id).unlink(missing_ok=True)

    def _path(self, record_id: str) -> Path:
        return self.folder / f"{record_id}{SUFFIX}"


class Page(msgspec.Struct, frozen=True):
    """Which part of a list is asked for."""

    after: str
    limit: int
    newest_first: bool = True

    def of(self, ids: Sequence[str], read: Callable[[str], T | None]) -> tuple[list[T], bool]:
        """The records behind `after` that `read` does not leave out; and whether there are more."""
        found: list[T] = []
        for one in sorted(ids, reverse=self.newest_first):
            if self.after and (one >= self.after if self.newest_first else one <= self.after):
                continue
            if (record := read(one)) is None:
                continue
            if len(found) == self.limit:
                return found, True
            found.append(record)
        return found, False


def not_found(kind: str, record_id: str, field: str = "") -> RequestError:
    return RequestError(f"there is no {kind} {record_id[:64]!r}", field=field, code=RejectCode.NOT_FOUND)
