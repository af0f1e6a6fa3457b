"""README.md and docs/settings.md say of each setting what its declaration says."""

from __future__ import annotations

import re

import msgspec

from scripts.documents.settings import BEGIN, DOCUMENT, END, README, documents, with_tables
from shared.config import Settings
from shared.config.catalogue import catalogue, shown


def test_the_tables_are_those_that_the_script_writes() -> None:
    for path, text in documents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run scripts/settings"


def test_they_name_every_setting_with_its_true_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {
        field.name: f"`{shown(field.default)}`" if field.default != "" else "empty"
        for field in msgspec.structs.fields(Settings)
    }
    readme = README.read_text(encoding="utf-8")
    table = readme[readme.index(BEGIN) : readme.index(END)]
    common = {setting.name for setting in catalogue() if setting.is_common}
    assert set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == common and "docs/settings.md" in readme


def test_only_what_is_between_the_marks_is_replaced() -> None:
    assert with_tables(f"a\n{BEGIN}\nold\n{END}\nb\n", "new\n") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
