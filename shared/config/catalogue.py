"""The settings with their descriptions, for help pages and docs/reference/settings.md.

Services never need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

from shared.config.section import Section
from shared.config.settings import sections

MI = 1 << 20


class Setting(msgspec.Struct, frozen=True):
    """One setting as its declaration describes it; `kind` is its bare type."""

    name: str
    kind: Any
    default: Any
    topic: str
    is_common: bool
    sentence: str


def catalogue() -> tuple[Setting, ...]:
    """Every setting in the order of their declaration."""
    return tuple(setting for section in sections().values() for setting in _settings(section))


def _settings(section: type[Section]) -> Iterator[Setting]:
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        kind, (meta,) = hints[field.name].__origin__, hints[field.name].__metadata__
        yield Setting(field.name, kind, field.default, section.TITLE, meta.extra["is_common"], meta.description)


def shown(value: Any) -> str:
    """A value as people write it: sizes in Mi, truth in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= MI and value % MI == 0:
        return f"{value // MI} Mi"
    return f"{value:g}" if isinstance(value, float) else str(value)
