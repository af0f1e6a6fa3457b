"""The pages of docs/reference, generated from the code: scripts/reference [--check]

With `--check` nothing is written, and the status is 1 where a page is stale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from scripts.documents.reference import cli, grpc, http, messages, metrics, models, settings

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings.render,
    "models.md": models.render,
    "cli.md": cli.render,
    "http.md": http.render,
    "grpc.md": grpc.render,
    "metrics.md": metrics.render,
    "messages.md": messages.render,
}


def stale() -> list[str]:
    """Names of the pages that are not what the code says now."""
    return [name for name, render in PAGES.items() if _written(name) != render()]


def _written(name: str) -> str:
    path = FOLDER / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where a page is stale")
    check, names = parser.parse_args().check, stale()
    for name in names:
        if not check:
            (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/reference/{name}: {'stale' if check else 'written'}")
    return int(check and bool(names))
