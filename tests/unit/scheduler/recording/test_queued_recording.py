"""The file of a recording: where it ends, and what a process that ends writes into it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.scheduler.main import make_core
from services.scheduler.recording.queued_recording import QueuedRecording
from services.scheduler.recording.recorder import RecordedScheduler
from shared.config import Settings

LARGE = 1 << 30


def test_a_recording_ends_behind_the_call_that_fills_it(tmp_path: Path) -> None:
    """Not before: with the smallest bound it has one call."""
    ends: list[str] = []
    recording = QueuedRecording(tmp_path / "calls", 1, on_end=ends.append)
    recording.write(b"a call")
    recording.close(30)
    assert (tmp_path / "calls").stat().st_size > 1 and ends == ["it has reached record_bytes"]


def test_a_recording_goes_on_to_its_last_byte(tmp_path: Path) -> None:
    sizes: list[int] = []
    for max_bytes in (LARGE, 0):
        recording = QueuedRecording(tmp_path / "calls", max_bytes or sizes[0] + 1, on_end=lambda _: None)
        for _ in range(2):
            recording.write(b"a call")
            recording.close(30)
            sizes.append((tmp_path / "calls").stat().st_size)
    assert sizes[0] < sizes[1] and sizes[2:] == sizes[:2]


def test_a_process_that_ends_writes_the_last_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda call, *values: at_exit.append(partial(call, *values)))
    core = make_core(Settings.of(record=str(tmp_path / "calls")))
    assert isinstance(core, RecordedScheduler) and len(at_exit) == 1
    core.set_detokenizers(["d"])
    at_exit[0]()
    assert (tmp_path / "calls").stat().st_size > 0
