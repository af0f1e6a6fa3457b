"""Command-line options: one for every setting, made from the settings' own declaration, and those of sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import IO, Any, TypeVar

import click

from services.cli.command_line.help import EXISTING_FILE, OPTIONS, Shown, option
from shared.config import ConfiguredDeployment, Settings, load_configuration, places
from shared.config.catalogue import Setting, catalogue, shown
from shared.config.sources import read_size
from shared.errors import ConfigError
from shared.processes.exit_status import EXIT_CONFIG

F = TypeVar("F", bound=Callable[..., Any])
NAMES = tuple(places())
SHORT = {"model": "-m"}
config_option = click.option(
    "--config",
    type=EXISTING_FILE,
    help="A pageant.toml with settings (or PAGEANT_CONFIG). Each may also be in the environment: --max-num-seqs is "
    "PAGEANT_MAX_NUM_SEQS.",
)


def settings_options(command: F) -> F:
    """Add `--max-num-seqs` and its like, and `--config`; what is not given is left to the environment."""
    for setting in reversed(catalogue()):
        section = "Common settings" if setting.is_common else f"Advanced settings: {setting.topic}"
        command = _setting_option(setting, section)(command)
    return config_option(command)


def deployment_options(command: F) -> F:
    """Add what finds a running deployment, alone; `take_settings` takes that too."""
    directory = next(setting for setting in catalogue() if setting.name == "runtime_dir")
    return config_option(_setting_option(directory, OPTIONS)(command))


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


def _setting_option(setting: Setting, section: str) -> Callable[[F], F]:
    default = f"  [default: {shown(setting.default)}]" if setting.default != "" else ""
    kind, short = NUMBER if setting.kind is int else None, SHORT.get(setting.name, "")
    text = f"{setting.sentence}{default}"
    return option(setting.name, setting.kind, None, Shown(text, kind, setting.is_common, short, section=section))


class IntegerOrSize(click.ParamType[int]):
    """A whole number, or a size with a unit such as 1GiB."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        read: int = click.INT.convert(read_size(value), param, ctx)
        return read


NUMBER = IntegerOrSize()


def _sampled(kind: type, sentence: str, *, is_common: bool = False) -> Shown:
    return Shown(sentence, kind, is_common, section="Sampling (without an option: the model's own defaults)")


SAMPLING = {
    "max_tokens": _sampled(int, "Most tokens to generate.", is_common=True),
    "min_tokens": _sampled(int, "Fewest tokens before the end of the sequence or a stop string may come."),
    "temperature": _sampled(float, "0: the most likely token; higher: more random, up to 2.", is_common=True),
    "top_k": _sampled(int, "Sample from so many most likely tokens only.", is_common=True),
    "top_p": _sampled(float, "Sample from the most likely tokens that have this share together.", is_common=True),
    "min_p": _sampled(float, "Sample from tokens at least so likely, relative to the most likely one."),
    "repetition_penalty": _sampled(float, "Above 1: tokens of the prompt and the output become less likely."),
    "frequency_penalty": _sampled(float, "Tokens become less likely with each time they were generated, -2 to 2."),
    "presence_penalty": _sampled(float, "Tokens that were generated become less likely, -2 to 2."),
    "seed": _sampled(int, "The same seed gives the same tokens.", is_common=True),
    "stop": Shown("End before this text; may be given again.", tuple[str, ...]),
}


def sampling_options(command: F, *, without: Collection[str] = ()) -> F:
    """Add the sampling parameters; what is not given is left to the model and the server."""
    for name, one in reversed(SAMPLING.items()):
        if name not in without:
            command = option(name, one.kind, None, one)(command)
    return command


def take_sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters from a command's arguments: those that were given."""
    given = {name: arguments.pop(name) for name in SAMPLING if name in arguments}
    return {name: value for name, value in given.items() if value not in (None, ())}
