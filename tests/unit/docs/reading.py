"""Commands, code, links and paths, as the documents have them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
AT_THE_ROOT = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "models/README.md",
    "examples/README.md",
)
GENERATED = tuple(sorted((ROOT / "docs" / "reference").glob("*.md")))  # from code: tests/unit/docs/test_reference.py
DOCUMENTS = (
    *(ROOT / name for name in AT_THE_ROOT),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path not in GENERATED),
)
HEADS = ("scripts/", "pageant", "docker", "curl", "pytest", "python", "lm_eval", "pip", "source")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
REMARK = re.compile(r"\s{2,}(?=[\w#]).*$|\s+#.*$")  # behind a command: a column of words, or a comment


@dataclass(frozen=True)
class Command:
    """One command of a document, without its remark; `words` as a shell would split it."""

    document: str
    text: str

    @property
    def variables(self) -> list[str]:
        found = []
        for word in self.text.split():
            if not VARIABLE.fullmatch(word):
                break
            found.append(word)
        return found

    @property
    def bare(self) -> str:
        """Without the variables in front."""
        return self.text.split(maxsplit=len(self.variables))[-1] if self.variables else self.text

    @property
    def words(self) -> list[str]:
        return shlex.split(self.bare.replace("[", " ").replace("]", " "))

    @property
    def options(self) -> list[str]:
        return OPTION.findall(self.bare)

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced one."""

    document: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        for language, text in FENCE.findall(path.read_text(encoding="utf-8")):
            yield Block(name_of(path), language, text)


def commands() -> list[Command]:
    """Of blocks and of spans in the text, each once."""
    found: dict[Command, None] = {}
    for block in blocks():
        for line in re.sub(r"\s*\\\n\s*", " ", block.text).splitlines():
            for part in _parts(line.strip().removeprefix("$ ")):
                found[Command(block.document, part)] = None
    for path in DOCUMENTS:
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        for span in SPAN.findall(text):
            for part in _parts(" ".join(span.split())):
                found[Command(name_of(path), part)] = None
    return list(found)


def _parts(line: str) -> Iterator[str]:
    """The commands of a line, which may be a pipe, or a list with &&."""
    for part in re.split(r"\s(?:\||&&)\s", line):
        command = Command("", " ".join(REMARK.sub("", part).split()))
        if is_command(command.bare):
            yield command.text


def is_command(text: str) -> bool:
    """Whether it begins with a program that the documents run: a script may stand alone, others have arguments."""
    head, _, rest = text.partition(" ")
    if head.startswith("scripts/"):
        return head != "scripts/" and not head.endswith((".py", ".md", "*")) and "/" not in head[len("scripts/") :]
    return bool(rest) and head in HEADS


def links() -> Iterator[tuple[Path, str]]:
    """Those that lead somewhere within the project."""
    for path in (*DOCUMENTS, *GENERATED):
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target:
                yield path, target


def paths() -> Iterator[tuple[str, str]]:
    """Files and folders that a text names by a path in this project."""
    folders = {entry.name for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    for path in DOCUMENTS:
        for span in SPAN.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
            first, slash, _ = span.partition("/")
            if slash and first in folders and re.fullmatch(r"[\w./-]+", span):
                yield name_of(path), span


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))
