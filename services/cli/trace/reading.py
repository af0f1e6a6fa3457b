"""Log lines from files, directories, standard input or `docker compose logs`, as entries with a time."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

STANDARD_INPUT = "-"
_decoder = msgspec.json.Decoder(dict[str, Any])


class LogEntry(msgspec.Struct):
    """One log line.  `time` is Unix seconds by the clock of the process that wrote it."""

    event: str
    time: float
    service: str
    instance: str
    fields: dict[str, Any]  # all of the line

    @property
    def request_id(self) -> str:
        return str(self.fields.get("request_id", ""))


def read(sources: Iterable[str]) -> Iterator[LogEntry]:
    """Entries of all sources, one after the other; what is no log line of ours is passed over."""
    for source in sources:
        for line in lines_of(source):
            if (entry := parse(line)) is not None:
                yield entry


def lines_of(source: str) -> Iterator[str]:
    """Lines of a file (also gzipped), of all files in a directory, or of standard input.  Raises OSError."""
    if source == STANDARD_INPUT:
        yield from sys.stdin
    elif (path := Path(source)).is_dir():
        for file in sorted(found for found in path.rglob("*") if found.is_file()):
            with opened(file) as text:
                yield from text
    else:
        with opened(path) as text:
            yield from text


def opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def parse(line: str) -> LogEntry | None:
    """The entry of a line, whatever `docker compose logs` has put before it; None where there is none."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        fields = _decoder.decode(line[start:])
        event, service, instance = fields["event"], fields["service"], fields["instance"]
        written = datetime.fromisoformat(fields["timestamp"]).timestamp()
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    told = fields.get("at", written)  # a line is written a moment after what it tells
    if not isinstance(told, float | int):
        return None
    return LogEntry(str(event), float(told), str(service), str(instance), fields)
