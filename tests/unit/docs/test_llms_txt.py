"""llms.txt has the form of llmstxt.org, its links lead somewhere, and it names every guide and reference page."""

from __future__ import annotations

import re

from tests.unit.docs.reading import ROOT

TEXT = (ROOT / "llms.txt").read_text(encoding="utf-8")
ENTRY = re.compile(r"- \[[^\]]+\]\(([^)]+)\): [A-Za-z`].*\.")


def test_it_has_a_title_a_summary_and_sections_of_links() -> None:
    head, *sections = re.split(r"(?m)^## ", TEXT)
    title, _, rest = head.partition("\n\n")
    assert title == "# Pageant" and rest.startswith("> ")
    for section in sections:
        _, *entries = section.strip().splitlines()
        assert all(ENTRY.fullmatch(entry) for entry in entries if entry), section


def test_its_links_exist() -> None:
    linked = ENTRY.findall(TEXT)
    assert len(linked) > 20 and not [path for path in linked if not (ROOT / path).is_file()]


def test_it_names_every_page() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")]
    missing = {str(path.relative_to(ROOT)) for path in pages if path.name != "README.md"} - set(ENTRY.findall(TEXT))
    assert not missing


def test_the_index_of_documents_names_every_guide() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    guides = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not {name for name in guides if f"({name})" not in index}
