"""Values of a config.json, checked as they are read: every error names the key, what it holds and what is served."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object.  Raises ModelError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def positive(key: str, value: Any) -> float:
    """A number above zero.  Raises ModelError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)


class ConfigKeys:
    """One JSON object of a configuration.  All methods raise ModelError naming the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{key} must be a positive integer, got {value!r}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer that may be zero."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{key} must be an integer of at least 0, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Above zero."""
        return positive(key, self._or_default(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{key} must be true or false, got {value!r}")
        return value

    def only(self, key: str, served: Any, *others: Any) -> None:
        """The key is absent, or holds one of these values: nothing else is served."""
        value = self.raw.get(key)
        if value is not None and value not in (served, *others):
            raise ModelError(f"{key} {value!r} is not supported; supported: {served}")

    def layer_kinds(self, count: int, served: Sequence[str]) -> list[str] | None:
        """`layer_types`, where it is there: one of the served kinds for each layer."""
        kinds = self.raw.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != count:
            raise ModelError(f"layer_types must list {count} layers, got {kinds!r}")
        unknown = sorted({str(kind) for kind in kinds} - set(served))
        if unknown:
            raise ModelError(f"layer_types has unsupported kinds: {', '.join(unknown)}")
        return kinds

    def integers(self, key: str) -> list[int]:
        """A list of them; empty where it is absent."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise ModelError(f"{key} must be a list of integers, got {value!r}")
        return value

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{key} is missing")
        return value
