"""Where settings come from: defaults < pageant.toml < PAGEANT_* environment < command line.  The environment is read
here only."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from shared.config.checks import check_settings
from shared.config.settings import Settings, places
from shared.errors import ConfigError

PREFIX = "PAGEANT_"


def load_settings(
    overrides: Mapping[str, Any] | None = None, *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from all sources, checked.  Raises ConfigError naming the source and the setting."""
    known = places().keys()
    merged: dict[str, Any] = {}
    environ = os.environ if environ is None else environ
    path = file or (Path(environ["PAGEANT_CONFIG"]) if environ.get("PAGEANT_CONFIG") else None)
    if path is not None:
        merged |= _read_file(path, known)
    for name, value in environ.items():
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key in known and value != "":
            merged[key] = value
    merged |= {key: value for key, value in (overrides or {}).items() if value is not None}
    try:
        settings = Settings.of(**merged)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    check_settings(settings)
    return settings


def settings_environment(settings: Settings) -> dict[str, str]:
    """The PAGEANT_* variables under which a child process reads these same settings."""
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.flat().items()}


def _read_file(path: Path, known: Set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    unknown = sorted(content.keys() - known)
    if unknown:
        raise ConfigError(f"{path} has unknown settings: {', '.join(unknown)}")
    return content
