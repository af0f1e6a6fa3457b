"""The transcripts of the documents, made by real runs.

A transcript is a fenced block whose first line is `$ scripts/quickstart ...` with a seed; what follows is what that
printed.  tests/system/commands/test_docs.py runs each again, with the bundled model on a private deployment, and with
PAGEANT_WRITE_GOLDEN=1 writes it into its document.  Times are of their day and are not compared.

The text is a function of the request, and of the arithmetic: native kernels have one order for every sum, and README's
came out the same with AVX2 and with AVX-512.  Where they cannot be (torch computes then) a token may differ.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unit.docs.reading import ROOT

WIDTH = 120
TIMEOUT = 300.0  # seconds, of one run
TRANSCRIPT = re.compile(r"^```\n\$ scripts/quickstart (?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
TIME = re.compile(r"[\d.]+\s+ms")


@dataclass(frozen=True)
class Transcript:
    """One of them, as its document has it."""

    path: Path
    words: list[str]
    text: str

    def made_anew(self) -> str:
        """What the command prints now, in lines of a document's width."""
        command = [sys.executable, "-m", "services.cli", "quickstart", *self.words]
        model = ["-m", str(ROOT / "models/pageant-stories")] if "-m" not in self.words else []
        done = subprocess.run([*command, *model], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        figures = next(line for line in done.stderr.splitlines() if "prompt tokens" in line)
        return "".join(f"{line}\n" for line in [*_wrapped(done.stdout), figures])

    def says(self, text: str) -> bool:
        return _comparable(self.text) == _comparable(text)

    def write(self, text: str) -> None:
        """Put what is printed now into the document."""
        document = self.path.read_text(encoding="utf-8")
        self.path.write_text(document.replace(self.text, text, 1), encoding="utf-8")


def _wrapped(text: str) -> Iterator[str]:
    for line in text.rstrip("\n").splitlines():
        yield from textwrap.wrap(line, WIDTH, break_long_words=False) or [""]


def _comparable(text: str) -> list[str]:
    """Words; spaces and lines are the document's, times their day's."""
    return TIME.sub("_ ms", text).split()


def transcripts() -> list[Transcript]:
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for match in TRANSCRIPT.finditer(path.read_text(encoding="utf-8")):
            words = shlex.split(match["words"])
            if "--seed" not in words:
                raise ValueError(f"{path.name}: a transcript without a seed can never be made again: {match['words']}")
            found.append(Transcript(path, words, match["text"]))
    return found
