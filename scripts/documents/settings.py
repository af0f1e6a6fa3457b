"""Writes the tables of settings in README.md (the common ones) and docs/settings.md (all) from their declarations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shared.config.catalogue import Setting, catalogue, shown

ROOT = Path(__file__).resolve().parents[2]
README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "settings.md"
BEGIN, END = "<!-- settings: written by scripts/settings -->", "<!-- end of settings -->"
HEAD = "| setting | default | meaning |\n|---|---|---|\n"


def table(settings: Iterable[Setting]) -> str:
    return HEAD + "".join(f"| `{one.name}` | {_default(one)} | {one.sentence} |\n" for one in settings)


def _default(setting: Setting) -> str:
    return f"`{shown(setting.default)}`" if setting.default != "" else "empty"


def with_tables(text: str, tables: str) -> str:
    """A document with the part between its two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables}{END}{rest.partition(END)[2]}"


def documents() -> dict[Path, str]:
    """What each document should be."""
    settings = catalogue()
    topics = dict.fromkeys(setting.topic for setting in settings)
    sections = "\n".join(f"## {topic}\n\n{table(s for s in settings if s.topic == topic)}" for topic in topics)
    common = table(setting for setting in settings if setting.is_common)
    return {
        README: with_tables(README.read_text(encoding="utf-8"), common),
        DOCUMENT: with_tables(DOCUMENT.read_text(encoding="utf-8"), f"\n{sections}\n"),
    }


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
