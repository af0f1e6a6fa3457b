"""The families of models that documents name are those that the engine serves."""

from __future__ import annotations

from pathlib import Path

from engine.description.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]


def test_the_readme_names_every_family() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith("| models |"))
    works = row.split("|")[2].split("([list]")[0]
    titles = dict.fromkeys(family.title for family in FAMILIES.values() if not family.text_of)
    assert [name.strip() for name in works.split(",")] == list(titles)
