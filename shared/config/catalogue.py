"""The settings with their descriptions, for help pages and docs/reference/settings.md.

Services never need it.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from shared.config.settings import Settings

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
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(_setting(field.name, hints[field.name], field.default) for field in msgspec.structs.fields(Settings))


def _setting(name: str, hint: Any, default: Any) -> Setting:
    meta = hint.__metadata__[0]
    return Setting(name, hint.__origin__, default, meta.title, meta.extra["is_common"], meta.description)


def shown(value: Any) -> str:
    """A value as people write it: sizes in Mi, truth in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= MI and value % MI == 0:
        return f"{value // MI} Mi"
    return f"{value:g}" if isinstance(value, float) else str(value)
