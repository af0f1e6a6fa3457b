"""Command-line options: one for every setting, made from the settings' own declaration, and those of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
import msgspec

from shared.config import PREFIX, Settings, load_settings
from shared.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
NAMES = tuple(field.name for field in msgspec.structs.fields(Settings))
SHORT = {"model": ("-m",)}


def settings_options(command: F) -> F:
    """Add `--max-num-seqs` and its like, and `--config`; what is not given is left to the environment."""
    hints = get_type_hints(Settings)
    for field in reversed(msgspec.structs.fields(Settings)):
        command = _option(field.name, hints[field.name], field.default)(command)
    return click.option(
        "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A pageant.toml."
    )(command)


def take_settings(arguments: dict[str, Any]) -> Settings:
    """Remove the settings from a command's arguments and load them; a bad one ends the command, saying which."""
    overrides = {name: arguments.pop(name) for name in NAMES}
    try:
        return load_settings(overrides, file=arguments.pop("config"))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


def _option(name: str, hint: Any, default: Any) -> Callable[[F], F]:
    flag = f"--{name.replace('_', '-')}"
    shown = f"Default {default!r}; " if default != "" else ""
    describe: dict[str, Any] = {"default": None, "help": f"{shown}environment {PREFIX}{name.upper()}."}
    if hint is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, **describe)
    if get_origin(hint) is Literal:
        kind: Any = click.Choice([str(choice) for choice in get_args(hint)])
    else:
        kind = hint
    return click.option(*SHORT.get(name, ()), flag, name, type=kind, **describe)


SAMPLING: Mapping[str, Any] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
}


def sampling_options(command: F) -> F:
    """Add the sampling parameters; what is not given is left to the model and the server."""
    command = click.option("--stop", multiple=True, help="End before this text; may be given again.")(command)
    for name, kind in reversed(list(SAMPLING.items())):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind)(command)
    return command


def take_sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters from a command's arguments: those that were given."""
    given = {name: arguments.pop(name) for name in (*SAMPLING, "stop")}
    return {name: value for name, value in given.items() if value not in (None, ())}
