"""The project has one version, and the changes of each version have a section."""

from __future__ import annotations

import re
import tomllib

from shared.version import VERSION
from tests.unit.docs.reading import ROOT


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == VERSION and re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_changes_begin_with_what_comes_next_and_have_this_version() -> None:
    titles = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == "Unreleased" and titles[1] == VERSION
