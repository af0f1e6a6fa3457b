"""Transcripts are compared by their words; only times may differ."""

from __future__ import annotations

from pathlib import Path

from tests.unit.docs.reading import ROOT
from tests.unit.docs.transcripts import TRANSCRIPT, Transcript, transcripts

TEXT = "there was a girl.\n\nShe\nprompt tokens: 5  time to first token: 80.8 ms\n"


def test_times_and_line_breaks_are_not_compared() -> None:
    made = Transcript(Path("x"), [], TEXT)
    assert made.says("there was\na girl.\n\nShe\nprompt tokens: 5  time to first token: 1080.8\nms\n")
    assert not made.says(TEXT.replace("girl", "boy"))
    assert not made.says(TEXT.replace("tokens: 5", "tokens: 6"))


def test_what_is_printed_now_takes_the_place_of_the_text(tmp_path: Path) -> None:
    guide = tmp_path / "start.md"
    guide.write_text(f"before\n{TEXT}behind\n")
    Transcript(guide, [], TEXT).write("there was a boy.\n")
    assert guide.read_text() == "before\nthere was a boy.\nbehind\n"


def test_the_first_guide_has_one_and_each_has_a_seed() -> None:
    found = transcripts()
    assert any(transcript.path == ROOT / "docs" / "start.md" for transcript in found)
    assert all("--seed" in transcript.words and transcript.text for transcript in found)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("$ scripts/quickstart") == len(TRANSCRIPT.findall(readme)), "what is not found is not tested"
