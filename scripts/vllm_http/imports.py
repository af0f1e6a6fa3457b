"""What vLLM's tests import of vLLM, where it is not installed: a few names that do something, and any other name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

STOOD_IN = ("vllm", "tests.utils", "tests.conftest", "tests.models", "fastapi", "httpx_mock", "tblib")
ITSELF = {  # files that need nothing of vLLM, or nothing that they use
    "vllm.utils.serial_utils": "vllm/utils/serial_utils.py",
    "vllm.entrypoints.pooling.utils": "vllm/entrypoints/pooling/utils.py",
    "tests.models.utils": "tests/models/utils.py",
}


class StandInFinder(MetaPathFinder, Loader):
    """Makes modules of which every name exists; `names` are those that do what the tests expect of them."""

    def __init__(self, source: Path, names: dict[str, dict[str, Any]]) -> None:
        self._source = source
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in ITSELF:
            return importlib.util.spec_from_file_location(name, self._source / ITSELF[name])
        if any(name == one or name.startswith(f"{one}.") for one in STOOD_IN):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._names.get(module.__name__, {}))


class StandInModule(ModuleType):
    """A module that has every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def install(source: Path, names: dict[str, dict[str, Any]]) -> None:
    """`names`: by module, what its names are."""
    sys.meta_path.insert(0, StandInFinder(source, names))
