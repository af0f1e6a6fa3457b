"""A recording's files: which frames are in which, how large each may be, and what a full disk leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.recording.segments import NUM_SEGMENTS, Segments, Share, make_room, segment


@pytest.mark.parametrize(
    ("max_bytes", "first", "behind"),
    [
        (40, 3, 7),  # a quarter of forty in all
        (40, 20, 20),  # behind a large state as much again
        (0, 0, 1),
    ],
)
def test_a_share_is_a_part_of_the_bound_and_at_least_twice_the_first_frame(
    max_bytes: int, first: int, behind: int
) -> None:
    share = Share(max_bytes)
    share.begin(first)
    found = [share.is_full]
    for _ in range(behind):
        share.add(1)
        found.append(share.is_full)
    assert found == [False] * behind + [True]
    share.begin(first)
    assert not share.is_full, "another begins"


def test_files_move_one_place_back_and_the_oldest_goes(tmp_path: Path) -> None:
    path, lost = tmp_path / "a.rec", list[str]()
    segments = Segments(path, 1000, lost.append)
    segments.write(b"nothing is open")
    assert not segments.is_open and not segments.is_full and not path.exists()
    for number in range(NUM_SEGMENTS + 2):
        segments.begin(f"first {number};".encode())
        segments.write(b"more")
        assert segments.is_open
    held = {age: segment(path, age).read_text() for age in range(NUM_SEGMENTS)}
    assert held == {age: f"first {NUM_SEGMENTS + 1 - age};more" for age in range(NUM_SEGMENTS)}
    assert len(list(tmp_path.iterdir())) == NUM_SEGMENTS and lost == []
    segments.close()
    segments.close()
    assert not segments.is_open


def test_gaps_among_the_files_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    for age in (0, 2):
        segment(path, age).write_text(str(age))
    make_room(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.rec.1": "0", "a.rec.3": "2"}


def test_a_segment_is_full_when_it_holds_its_share(tmp_path: Path) -> None:
    segments, found = Segments(tmp_path / "a.rec", 40, lambda reason: None), []
    segments.begin(b"1234")
    for frame in (b"12345", b"6"):
        segments.write(frame)
        found.append(segments.is_full)
    segments.begin(b"1234")
    assert [*found, segments.is_full] == [False, True, False]
    segments.close()


def test_a_disk_that_takes_a_little_at_a_time_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    monkeypatch.setattr(os, "write", lambda file, data: really(file, data[:3]))
    segments = Segments(tmp_path / "a.rec", 1000, lambda reason: None)
    segments.begin(b"0123456789")
    segments.close()
    assert (tmp_path / "a.rec").read_bytes() == b"0123456789"


def test_a_part_without_its_first_frame_drives_out_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lost, really = tmp_path / "a.rec", list[str](), os.write
    segments = Segments(path, 1000, lost.append)
    segments.begin(b"good")

    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        segments.begin(b"lost")
        assert not segments.is_open and not segments.is_full
    assert len(lost) == 3
    monkeypatch.setattr(os, "write", really)
    segments.begin(b"again")
    segments.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.rec": b"again", "a.rec.1": b"good"}


def test_only_its_owner_may_read_a_recording(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "a.rec", 1000, lambda reason: None)
    segments.begin(b"x")
    segments.close()
    assert (tmp_path / "a.rec").stat().st_mode & 0o777 == 0o600
