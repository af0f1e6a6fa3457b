"""What a service imports, wherever in a module, is required by what its image installs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"worker": "worker", "draft": "worker", "tokenizer": "tokenizer", "gateway": "tokenizer",
          "scheduler": "tokenizer", "detokenizer": "tokenizer"}  # fmt: skip


def imports_at_run_time(tree: ast.AST) -> Iterator[str]:
    """Dotted names; those for type checkers alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for part in node.orelse for name in imports_at_run_time(part))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports_at_run_time(node)


def path_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


def libraries(module: str) -> dict[str, str]:
    """Top-level names that a module and those of the project that it imports need, with one module that does."""
    found: dict[str, str] = {}
    open_modules, seen = [module], {module}
    while open_modules:
        name = open_modules.pop()
        path = path_of(name)
        assert path is not None
        for imported in imports_at_run_time(ast.parse(path.read_text(encoding="utf-8"))):
            top = imported.split(".")[0]
            if (ROOT / top).is_dir():
                if imported not in seen and path_of(imported) is not None:
                    open_modules.append(imported)
                    seen.add(imported)
            elif top not in sys.stdlib_module_names and top != "__future__":
                found.setdefault(top, name)
    return found


def required(extra: str) -> set[str]:
    """Names of distributions, as PEP 503 normalises them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"][extra]
    return {normalised(re.split(r"[^\w.-]", line)[0]) for line in lines}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("service", EXTRAS)
def test_an_image_has_what_its_service_imports(service: str) -> None:
    distributions = packages_distributions()
    has = required(EXTRAS[service])
    needed = libraries(f"services.{service}.__main__")
    assert "msgspec" in needed
    absent = {
        name: module
        for name, module in needed.items()
        if not {normalised(one) for one in distributions.get(name, [name])} & has
    }
    assert absent == {}
