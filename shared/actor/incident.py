"""The file of an incident, a stall or a fatal error: one JSON file each, and only a few of them are kept.

It holds stacks, the state of the service and the last events.  None of these has prompts or outputs: stacks are names
of functions and lines of source without their variables, the state is counts and ids, and events are log lines.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shared.config import Settings
from shared.errors import PageantError
from shared.processes.logging import recent_events
from shared.processes.losses import INCIDENT, count_loss

log = structlog.get_logger()

SECRET = ("api_keys",)  # settings that are left out
MAX_FRAMES = 64
MAX_ERROR_CHARS = 500
QUIET_SECONDS = 10.0  # after one incident of a process, before the next is worth a file

Snapshot = Callable[[], Mapping[str, Any]]


class Incidents:
    """Writes the incidents of one process.  A failure to write costs a log line and nothing else.

    The content is collected at once, and written by a thread: a slow disk does not delay the event loop.
    """

    def __init__(self, settings: Settings, service: str, instance: str, snapshot: Snapshot) -> None:
        self._settings = settings
        self._directory = settings.deployment.incident_path
        self._service = service
        self._instance = instance
        self._snapshot = snapshot
        self._last = float("-inf")
        self._lock = threading.Lock()  # the watchdog writes from a thread of its own
        self._writer: threading.Thread | None = None

    def write(self, cause: str, error: BaseException | None = None) -> Path | None:
        """One file, unless there was one just now; returns where it will be."""
        with self._lock:
            if time.monotonic() - self._last < QUIET_SECONDS:
                return None
            self._last = time.monotonic()
            path = self._directory / f"{self._service}-{time.time_ns() // 1000}-{self._instance}.json"
            try:
                if self._writer is not None and self._writer.is_alive():
                    raise BlockingIOError("the one before it is not written yet")
                data = msgspec.json.encode(self._bundle(cause, error), enc_hook=repr)
                write = partial(copy_context().run, self._write, cause, path, data)  # for its log lines
                self._writer = threading.Thread(target=write, name="incident", daemon=True)
                self._writer.start()
            except Exception as failure:
                self._lose(cause, failure)
                return None
        return path

    def drain(self, seconds: float) -> None:
        """Wait at most so long until the file is written."""
        if self._writer is not None:
            self._writer.join(seconds)

    def _write(self, cause: str, path: Path, data: bytes) -> None:
        try:
            self._save(path, data)
        except Exception as failure:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # half a file would push out a whole one
            self._lose(cause, failure)
        else:
            log.error("incident", cause=cause, file=str(path))

    def _lose(self, cause: str, failure: Exception) -> None:
        count_loss(INCIDENT)
        log.error("incident_lost", cause=cause, reason=repr(failure))

    def _bundle(self, cause: str, error: BaseException | None) -> dict[str, Any]:
        return {
            "cause": cause,
            "time": time.time(),
            "service": self._service,
            "instance": self._instance,
            "error": described(error) if error is not None else None,
            "stacks": stacks(),
            "state": attempted(self._snapshot),
            "events": recent_events(),
            "process": process(),
            "settings": {k: v for k, v in self._settings.flat().items() if k not in SECRET},
        }

    def _save(self, path: Path, data: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.format(data))
        kept = self._settings.deployment.max_incidents
        for old in sorted(self._directory.glob(f"{self._service}-[0-9]*.json"))[:-kept]:
            old.unlink(missing_ok=True)


def stacks() -> dict[str, list[str]]:
    """The stack of every thread, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')} ({ident})": lines_of(traceback.extract_stack(frame, limit=MAX_FRAMES))
        for ident, frame in sys._current_frames().items()
    }


def lines_of(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames]


def described(error: BaseException) -> dict[str, Any]:
    """Type, stack and cause of an error; its text only where it is ours: other texts may quote prompts."""
    words = str(error)[:MAX_ERROR_CHARS] if isinstance(error, PageantError) else ""
    cause = error.__cause__ or error.__context__
    return {
        "type": type(error).__name__,
        "words": words,
        "stack": lines_of(traceback.extract_tb(error.__traceback__, limit=MAX_FRAMES)),
        "cause": described(cause) if cause is not None else None,
    }


def attempted(snapshot: Snapshot) -> Mapping[str, Any]:
    """The state of an actor, or the error that it raises when asked after a defect."""
    try:
        return snapshot()
    except Exception as error:
        return {"lost": type(error).__name__}


def process() -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "max_resident_kib": usage.ru_maxrss,
        "num_threads": threading.active_count(),
    }
