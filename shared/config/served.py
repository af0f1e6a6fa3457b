"""The models of one deployment beside its first: what the configuration says of each, and the settings that follow.

In pageant.toml each is a table, `[models.NAME]`, with `model`, `aliases`, `workers`, `asleep` and any setting of a
model.  `pageant serve` keeps the list in a file that gateways read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.config.checks import check_settings
from shared.config.settings import Settings, places
from shared.errors import ConfigError

MAX_NAME_CHARS = 256
MAX_WORKERS = 64
# Settings of one model; all others are the deployment's.
SECTIONS = frozenset({"engine", "memory", "scheduling", "speculation", "adapters", "admission"})
OF_MODELS = frozenset({"sleep_after", "pinned", "tool_call_parser", "reasoning_parser", "chat_template"})
NOT_OF_MODELS = frozenset({"model", "served_model_name", "num_tokenizer_threads"})
# What the first model's settings say of that model alone.
NOT_INHERITED = (
    "served_model_name", "load_format", "quantization", "mixed_workers", "max_model_len", "max_input_length",
    "draft", "lora_modules", "lora_dir", "pinned", "tool_call_parser", "reasoning_parser", "chat_template",
    "record", "record_steps", "metrics_port", "kv_events", "kv_events_replay",
)  # fmt: skip


class FurtherModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model beside the first: one scheduler, its workers, a tokenizer and a detokenizer."""

    name: str
    model: str  # as the setting: a directory, or a repository
    aliases: list[str] = []
    workers: int = 1
    asleep: bool = False  # until the first request
    settings: dict[str, Any] = {}  # that differ from the deployment's, by their flat names

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may call it."""
        return (self.name, *self.aliases)

    @property
    def place(self) -> str:
        """Of its directory within the deployment's: short, since the names of sockets are bounded."""
        return f"m-{hashlib.blake2b(self.name.encode(), digest_size=4).hexdigest()}"


def read_tables(tables: Any) -> list[FurtherModel]:
    """The `models` of a configuration file.  Raises ConfigError naming the model and what is wrong with it."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("models: each must be a table, [models.NAME]")
    return [read_table(name, table) for name, table in tables.items()]


def read_table(name: str, table: Mapping[str, Any]) -> FurtherModel:
    own = {field: table[field] for field in ("model", "aliases", "workers", "asleep") if field in table}
    rest = {field: value for field, value in table.items() if field not in own}
    for field in rest:
        if not is_of_model(field):
            why = "is a setting of the whole deployment" if field in places() else "is no setting"
            raise ConfigError(f"models.{name}: {field} {why}")
    try:
        found = msgspec.convert({**own, "name": name, "settings": rest}, FurtherModel, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"models.{name}: {error}") from error
    check_names(found)
    if not 1 <= found.workers <= MAX_WORKERS:
        raise ConfigError(f"models.{name}: workers must be in 1..{MAX_WORKERS}, got {found.workers}")
    return found


def check_names(model: FurtherModel) -> None:
    for name in model.names:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or "," in name or name != name.strip():
            raise ConfigError(
                f"a model's name must have 1 to {MAX_NAME_CHARS} printable characters and no comma, got {name[:64]!r}"
            )


def is_of_model(name: str) -> bool:
    """Whether one model may have a setting otherwise than the rest of the deployment."""
    return name in OF_MODELS or (places().get(name) in SECTIONS and name not in NOT_OF_MODELS)


def check_models(first: Iterable[str], models: Iterable[FurtherModel]) -> None:
    """Raise ConfigError where two models have one name.  `first`: the names of the first model."""
    owners: dict[str, str] = {}
    groups = [("the first model", tuple(first)), *((f"model {model.name!r}", model.names) for model in models)]
    for owner, names in groups:
        for name in names:
            if name in owners:
                raise ConfigError(f"the name {name!r} of {owner} is taken by {owners[name]}")
            owners[name] = owner


def settings_of_model(deployment: Settings, served: FurtherModel) -> Settings:
    """The settings of a further model's services, and of a gateway's part for it.  Raises ConfigError."""
    own = Settings().flat()
    inherited = {name: value for name, value in deployment.flat().items() if name not in NOT_INHERITED}
    changes = {
        "model": served.model,
        "served_model_name": ",".join(served.names),
        "runtime_dir": str(deployment.deployment.runtime_path / served.place),
        "status_file": "",
        "metrics_port": -1,
    }
    for name in ("record", "record_steps"):
        if file := getattr(deployment.observation, name):
            changes[name] = f"{file}.{served.place}"
    try:
        settings = Settings.of(**own | inherited | served.settings | changes)
        check_settings(settings)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"model {served.name!r}: {error}") from error
    return settings


def read_models(file: Path) -> list[FurtherModel]:
    """What `write_models` wrote; none where there is no such file.  Raises ConfigError where it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[FurtherModel])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"models_file {file} cannot be read: {error}") from error


def write_models(file: Path, models: list[FurtherModel]) -> None:
    """Put the list in place at once, so that no reader sees a part of it.  Raises OSError."""
    made = file.with_name(f"{file.name}.{os.getpid()}")
    made.write_bytes(msgspec.json.encode(models))
    made.replace(file)
