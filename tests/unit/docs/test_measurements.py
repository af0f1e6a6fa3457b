"""Records of measurements say when, where and how they were made; the pictures of README are drawn from records."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.documents.chart import DOCS, PICTURE, draw, record
from scripts.documents.recording import film
from scripts.documents.recording.main import PICTURE as KILLED
from scripts.documents.recording.main import recorded

FOLDER = DOCS / "measurements"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
HEAD = re.compile(
    r"^# [^\n]+\n\n\| date \| machine \| command \|\n\|---\|---\|---\|\n\| ([^|]+) \| ([^|]+) \| ([^|]+) \|\n"
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_begins_with_date_machine_and_command(path: Path) -> None:
    found = HEAD.match(path.read_text(encoding="utf-8"))
    assert found, f"{path.name} does not begin with a title and a table of date, machine and command"
    date, machine, command = found.groups()
    assert re.search(r"20\d\d-\d\d-\d\d", date) and machine.strip() and "`" in command


def test_every_record_is_in_the_index() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in RECORDS if f"({path.name})" not in index] == []


def test_the_chart_is_drawn_from_its_record() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(record()), "docs/images/engines.svg is stale: run scripts/chart"


def test_the_chart_shows_the_figures_of_the_table() -> None:
    found, table = record(), (FOLDER / "engines.md").read_text(encoding="utf-8")
    assert found.date in table and found.source
    for engine in found.engines:
        assert len(engine.figures) == len(found.workloads)
        for figure in engine.figures:
            assert figure is None or re.search(rf"\| (\*\*)?{figure:g}(\.0)?(\*\*)? \|", table), (engine.name, figure)


def test_the_recording_is_drawn_from_what_happened() -> None:
    found = recorded()
    assert KILLED.read_text(encoding="utf-8") == film.draw(found), "run scripts/record_demo --draw"
    assert found.status_of_diff == 0 and found.killed == found.undisturbed and found.pause > 0.2
    assert found.date and found.machine and found.command == "scripts/record_demo"


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_well_formed_and_has_a_title(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.findtext("{http://www.w3.org/2000/svg}title")
