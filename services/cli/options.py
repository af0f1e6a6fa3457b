"""Command-line options: one for every setting, made from the settings' own declaration, and those of sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

from services.cli.help import SectionedOption
from shared.config import ConfiguredDeployment, Settings, load_configuration, places
from shared.config.catalogue import Setting, catalogue, shown
from shared.config.sources import read_size
from shared.errors import ConfigError
from shared.exit_status import EXIT_CONFIG

F = TypeVar("F", bound=Callable[..., Any])
NAMES = tuple(places())
SHORT = {"model": ("-m",)}
SAY_WHERE = ("runtime_dir",)  # the settings that find a running deployment
config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A pageant.toml with settings (or PAGEANT_CONFIG). Each may also be in the environment: --max-num-seqs is "
    "PAGEANT_MAX_NUM_SEQS.",
)


def settings_options(command: F) -> F:
    """Add `--max-num-seqs` and its like, and `--config`; what is not given is left to the environment."""
    for setting in reversed(catalogue()):
        command = _option(setting)(command)
    return config_option(command)


def deployment_options(command: F) -> F:
    """Add the options that find a running deployment, alone; `take_settings` takes them too."""
    for setting in reversed(catalogue()):
        if setting.name in SAY_WHERE:
            command = _option(setting, section="Options")(command)
    return config_option(command)


def take_settings(arguments: dict[str, Any]) -> Settings:
    """Remove the settings from a command's arguments and load them; a bad one ends the command, saying which."""
    return take_configuration(arguments).settings


def take_configuration(arguments: dict[str, Any]) -> ConfiguredDeployment:
    """As `take_settings`, with the models beside the first."""
    overrides = {name: arguments.pop(name) for name in NAMES if name in arguments}
    try:
        return load_configuration(overrides, file=arguments.pop("config"))
    except ConfigError as error:
        raise SettingsError(str(error)) from error


class SettingsError(click.ClickException):
    """A setting that cannot work."""

    exit_code = EXIT_CONFIG

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"pageant: {self.format_message()}", file=file, err=file is None)


def _option(setting: Setting, *, section: str = "") -> Callable[[F], F]:
    flag = f"--{setting.name.replace('_', '-')}"
    default = f"  [default: {shown(setting.default)}]" if setting.default != "" else ""
    describe: dict[str, Any] = {
        "cls": SectionedOption,
        "default": None,
        "help": f"{setting.sentence}{default}",
        "is_common": setting.is_common,
        "section": section or ("Common settings" if setting.is_common else f"Advanced settings: {setting.topic}"),
    }
    if setting.kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", setting.name, **describe)
    if get_origin(setting.kind) is Literal:
        kind: Any = click.Choice([str(choice) for choice in get_args(setting.kind)])
    else:
        kind = NUMBER if setting.kind is int else setting.kind
    return click.option(*SHORT.get(setting.name, ()), flag, setting.name, type=kind, **describe)


class IntegerOrSize(click.ParamType[int]):
    """A whole number, or a size with a unit such as 1GiB."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        read: int = click.INT.convert(read_size(value), param, ctx)
        return read


NUMBER = IntegerOrSize()


class Sampled(msgspec.Struct, frozen=True):
    """A sampling parameter as the command line takes it."""

    kind: type
    sentence: str
    is_common: bool = False


SAMPLING: dict[str, Sampled] = {
    "max_tokens": Sampled(int, "Most tokens to generate.", is_common=True),
    "min_tokens": Sampled(int, "Fewest tokens before the end of the sequence or a stop string may come."),
    "temperature": Sampled(float, "0: the most likely token; higher: more random, up to 2.", is_common=True),
    "top_k": Sampled(int, "Sample from so many most likely tokens only.", is_common=True),
    "top_p": Sampled(float, "Sample from the most likely tokens that have this share together.", is_common=True),
    "min_p": Sampled(float, "Sample from tokens at least so likely, relative to the most likely one."),
    "repetition_penalty": Sampled(float, "Above 1: tokens of the prompt and the output become less likely."),
    "frequency_penalty": Sampled(float, "Tokens become less likely with each time they were generated, -2 to 2."),
    "presence_penalty": Sampled(float, "Tokens that were generated become less likely, -2 to 2."),
    "seed": Sampled(int, "The same seed gives the same tokens.", is_common=True),
}


def sampling_option(name: str) -> Callable[[F], F]:
    """The option of one sampling parameter."""
    one = SAMPLING[name]
    section = "Sampling (without an option: the model's own defaults)"
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        type=one.kind,
        help=one.sentence,
        cls=SectionedOption,
        section=section,
        is_common=one.is_common,
    )


def sampling_options(command: F) -> F:
    """Add the sampling parameters; what is not given is left to the model and the server."""
    command = click.option("--stop", multiple=True, help="End before this text; may be given again.")(command)
    for name in reversed(SAMPLING):
        command = sampling_option(name)(command)
    return command


def take_sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters from a command's arguments: those that were given."""
    given = {name: arguments.pop(name) for name in (*SAMPLING, "stop") if name in arguments}
    return {name: value for name, value in given.items() if value not in (None, ())}
