"""The recording of README, played again: the only worker is killed in mid-stream, and the answers do not differ."""

from __future__ import annotations

from pathlib import Path

from scripts.documents.recording.film import draw
from scripts.documents.recording.scene import CLIENT, KILL_AFTER, play


def test_the_scene_plays_as_it_was_recorded(tmp_path: Path) -> None:
    found = play(tmp_path, "--min-tokens", "350")  # longer than what is recorded, for a machine that is busy
    assert found.status_of_diff == 0 and found.killed == found.undisturbed
    assert len(found.undisturbed) > 2 * KILL_AFTER, "the worker was killed in the first half of the answer"
    before = "".join(one.text for one in found.events if one.window == CLIENT and one.at <= found.killed_at)
    assert len(before) < len(found.undisturbed) + len(found.killed)
    assert found.pause > 0.2, "the stream waited for another worker"
    assert "no difference" in draw(found)
