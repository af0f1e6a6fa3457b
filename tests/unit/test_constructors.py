"""How many collaborators a constructor takes: a class of a service takes five at most.

A parameter is a collaborator where its annotation names something that does things: a function, or a class that is not
a plain value.  Plain values are numbers, texts, paths, enums, messages (msgspec structs), named tuples and frozen
dataclasses whose fields are plain values, and containers of these.  A frozen dataclass that holds
collaborators is one collaborator itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 5
PACKAGES = ("services", "shared", "engine", "kernels", "protos")
PLAIN_BASES = {"Struct", "NamedTuple", "Enum", "IntEnum", "StrEnum", "IntFlag", "TypedDict"}
PLAIN_NAMES = {
    "None", "bool", "int", "float", "str", "bytes", "bytearray", "memoryview", "object", "type", "Any", "Literal",
    "Path", "Random", "list", "dict", "set", "frozenset", "tuple", "deque", "OrderedDict", "Counter", "Mapping",
    "MutableMapping", "Iterable", "Iterator", "Collection", "Sequence", "Seq", "Set", "Optional",
}  # fmt: skip


@dataclass
class Module:
    """What a module's names stand for."""

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name -> module and name there


@cache
def module(name: str) -> Module:
    path = ROOT / Path(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = Module()
    if not file.exists():
        return found
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.aliases[node.targets[0].id] = node.value
    return found


def names_in(annotation: ast.expr) -> Iterator[str]:
    """The names in an annotation, those in quotation marks included."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def is_collaborator(annotation: ast.expr | None, where: str) -> bool:
    """Whether an annotation in the module `where` names something that does things."""
    return annotation is not None and any(acts(name, where) for name in names_in(annotation))


@cache
def acts(name: str, where: str) -> bool:
    here = module(where)
    if name in here.classes:
        return not is_plain(here.classes[name], where)
    if name in here.imported:
        source, original = here.imported[name]
        if source.split(".")[0] in PACKAGES:
            return acts(original, source)
        return original not in PLAIN_NAMES
    if name in here.aliases:
        return is_collaborator(here.aliases[name], where)
    return name == "Callable"


def is_ours(name: str, where: str) -> bool:
    here = module(where)
    return name in here.classes or here.imported.get(name, ("",))[0].split(".")[0] in PACKAGES


def is_plain(node: ast.ClassDef, where: str) -> bool:
    bases = [name for base in node.bases for name in names_in(base)]
    if any(name in PLAIN_BASES or (is_ours(name, where) and not acts(name, where)) for name in bases):
        return True
    fields = [item.annotation for item in node.body if isinstance(item, ast.AnnAssign)]
    is_frozen = any("frozen" in ast.unparse(decorator) for decorator in node.decorator_list)
    return is_frozen and not any(is_collaborator(annotation, where) for annotation in fields)


def constructors(package: str) -> Iterator[tuple[str, list[str]]]:
    """Of each class: its name, and the names of the collaborators that it is made with."""
    for file in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        where = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in module(where).classes.values():
            yield (
                f"{where}.{node.name}",
                [name for name, annotation in parameters(node) if is_collaborator(annotation, where)],
            )


def parameters(node: ast.ClassDef) -> list[tuple[str, ast.expr | None]]:
    """Those of its `__init__`; of a dataclass, its fields."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            return [(argument.arg, argument.annotation) for argument in arguments[1:]]
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [
            item for item in node.body if isinstance(item, ast.AnnAssign) and "init=False" not in ast.unparse(item)
        ]
        return [(item.target.id, item.annotation) for item in fields if isinstance(item.target, ast.Name)]
    return []


def test_no_constructor_has_six_collaborators() -> None:
    found = dict(constructors("services"))
    assert not {name: collaborators for name, collaborators in found.items() if len(collaborators) > MOST}
    assert len(found) > 300


def test_collaborators_are_told_from_plain_values() -> None:
    found = dict(constructors("services.scheduler"))
    batcher = "services.scheduler.planning.batching.Batcher"
    assert found[batcher] == ["replica", "drafting", "forks", "books"], "its policy is a plain value"
    books = "services.scheduler.telemetry.books.Books"
    assert found[books] == ["counters", "journal", "misses", "shares", "accounts"], "frozen, but what it holds acts"
    assert found["services.scheduler.state.sequence.Sequence"] == ["request"], "token ids and counts are plain values"
    recording = "services.scheduler.recording.queued_recording.QueuedRecording"
    assert found[recording] == ["on_end"], "functions are collaborators"
