"""Where settings come from: defaults < pageant.toml < PAGEANT_* environment < command line.  The environment is read
here only."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from shared.config.checks import check_settings
from shared.config.served import FurtherModel, check_models, read_tables, settings_of_model
from shared.config.settings import Settings, places
from shared.errors import ConfigError

PREFIX = "PAGEANT_"
FILE = f"{PREFIX}CONFIG"
SIZE = re.compile(r"([0-9]+) ?([KMGT])i(?:B)?")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TABLES = "models"  # in the file: a table for each further model


class ConfiguredDeployment(msgspec.Struct, frozen=True):
    """A deployment's settings, and its models beside the first."""

    settings: Settings
    models: list[FurtherModel] = []
    workers: int | None = None  # of the first model, where its table says it


def load_settings(
    overrides: Mapping[str, Any] | None = None, *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from all sources, checked.  Raises ConfigError naming the source and the setting."""
    return _settings(_merged(overrides, file, environ)[0])


def load_configuration(
    overrides: Mapping[str, Any] | None = None, *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> ConfiguredDeployment:
    """As `load_settings`, with the models.  Where no `model` is named but in tables, the first of these is the first
    model."""
    merged, models = _merged(overrides, file, environ)
    workers = None
    if models and "model" not in merged:
        first, models = models[0], models[1:]
        if first.asleep:
            raise ConfigError(f"models.{first.name}: the first model cannot begin asleep")
        merged |= {**first.settings, "model": first.model, "served_model_name": ",".join(first.names)}
        workers = first.workers
    settings = _settings(merged)
    if models and settings.deployment.transport != "ipc":
        raise ConfigError("models: several models need transport=ipc, one host")
    if models and settings.engine.executor == "ray":
        raise ConfigError("models: several models need one host, but executor is 'ray'")
    check_models(settings.engine.model_names, models)
    for model in models:
        settings_of_model(settings, model)
    return ConfiguredDeployment(settings, models, workers)


def _merged(
    overrides: Mapping[str, Any] | None, file: Path | None, environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], list[FurtherModel]]:
    known = places().keys()
    merged: dict[str, Any] = {}
    models: list[FurtherModel] = []
    environ = os.environ if environ is None else environ
    path = file or (Path(environ[FILE]) if environ.get(FILE) else None)
    if path is not None:
        merged |= _read_file(path, known)
        models = read_tables(merged.pop(TABLES, {}))
    for name, value in environ.items():
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key in known and value != "":
            merged[key] = value
    merged |= {key: value for key, value in (overrides or {}).items() if value is not None}
    merged = {key: read_size(value) for key, value in merged.items()}
    return merged, models


def _settings(merged: dict[str, Any]) -> Settings:
    try:
        settings = Settings.of(**merged)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    check_settings(settings)
    return settings


def read_size(value: Any) -> Any:
    """A size with a unit, such as 512MiB, as a number of bytes; anything else as it is."""
    found = SIZE.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else int(found[1]) * UNITS[found[2]]


def settings_environment(settings: Settings) -> dict[str, str]:
    """The PAGEANT_* variables under which a child process reads these same settings.

    It reads no file beside them: the file may have changed, and would fill in what is empty here.
    """
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.flat().items()} | {FILE: ""}


def _read_file(path: Path, known: Set[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    unknown = sorted(content.keys() - known - {TABLES})
    if unknown:
        raise ConfigError(f"{path} has unknown settings: {', '.join(unknown)}")
    return content
