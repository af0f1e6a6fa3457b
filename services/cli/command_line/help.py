"""Options and help pages: `-h` shows a command's common options, `--help` all of them in sections.

The options of some commands are the fields of a struct: its name, type, default and sentence are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

OPTIONS = "Options"
IS_SHORT = "pageant.is_short_help"
S = TypeVar("S", bound=msgspec.Struct)
F = TypeVar("F", bound=Callable[..., Any])
DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT, FROM_0 = click.IntRange(min=1), click.IntRange(min=0)
SHARE, NOT_NEGATIVE = click.FloatRange(0, 1), click.FloatRange(min=0)


class Listed(click.ParamType[list[Any]]):
    """Values of one kind, separated by commas: `--workers 1,2,4`."""

    def __init__(self, kind: Callable[[str], Any], name: str) -> None:
        self._kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if not isinstance(value, str):
            return list(value)
        try:
            return [self._kind(word) for word in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not {self.name}", param, ctx)


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number


INTEGERS = Listed(positive, "whole numbers from 1, with commas between")
NUMBERS = Listed(float, "numbers, with commas between")
WORDS = Listed(str, "words, with commas between")


class SectionedOption(click.Option):
    """An option that belongs to a section of the help page."""

    def __init__(self, *args: Any, section: str = OPTIONS, is_common: bool = True, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.section = section
        self.is_common = is_common


class SectionedCommand(click.Command):
    """A command whose options are listed in sections, the common ones first."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        if not all(getattr(param, "is_common", True) for param in self.params):
            text = "Show the common options and exit."
            self.params.append(
                click.Option(
                    ["-h"], is_flag=True, is_eager=True, expose_value=False, callback=_show_short_help, help=text
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        num_left_out = 0
        for param in sorted(self.get_params(ctx), key=lambda param: not getattr(param, "is_common", True)):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if ctx.meta.get(IS_SHORT) and not getattr(param, "is_common", True):
                num_left_out += 1
            else:
                sections.setdefault(getattr(param, "section", OPTIONS), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if num_left_out:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help` shows {num_left_out} advanced options more.")


class Group(click.Group):
    """A group of such commands; some of them in other modules, which are imported when they are asked for."""

    command_class = SectionedCommand
    group_class = type

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] = MappingProxyType({}), **rest: Any) -> None:
        """`elsewhere`: the module and name of a command, as `package.module:name`, by what it is called."""
        super().__init__(*args, **rest)
        self._elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._elsewhere and cmd_name not in self.commands:
            module, _, name = self._elsewhere[cmd_name].partition(":")
            self.add_command(getattr(import_module(module), name), cmd_name)
        return super().get_command(ctx, cmd_name)


def _show_short_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[IS_SHORT] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Shown(msgspec.Struct, frozen=True):
    """How a field is shown on the command line; to be given as its annotation."""

    help: str
    kind: Any = None  # a type of click's, where the field's own does not say enough
    is_common: bool = True
    short: str = ""
    envvar: str | None = None
    section: str = ""  # empty: the one of all common or of all advanced options


def advanced(help: str, kind: Any = None) -> Shown:
    """A field whose option `-h` leaves out."""
    return Shown(help, kind, is_common=False)


def field_options(struct: type[msgspec.Struct], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Add an option for each field; `take` makes the struct of their values."""

    def add(command: F) -> F:
        for field in reversed(msgspec.structs.fields(struct)):
            if field.name not in without:
                kind, shown = get_args(field.type)
                command = option(field.name, kind, field.default, shown)(command)
        return command

    return add


def take(struct: type[S], arguments: dict[str, Any]) -> S:
    """Remove a struct's fields from a command's arguments."""
    return struct(**{name: arguments.pop(name) for name in struct.__struct_fields__ if name in arguments})


def option(name: str, kind: Any, default: Any, shown: Shown) -> Callable[[F], F]:
    """An option for values of this type."""
    flag = f"--{name.replace('_', '-')}"
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    rest: dict[str, Any] = {"type": shown.kind or kind}
    if kind is bool:
        rest = {"is_flag": True}
        flag += "" if default is False else f"/--no-{flag[2:]}"
    elif get_origin(kind) is Literal:
        rest = {"type": click.Choice([str(choice) for choice in get_args(kind)])}
    elif get_origin(kind) is tuple:
        rest = {"multiple": True}
    elif isinstance(shown.kind, Listed) and default is not None:
        default = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
    return click.option(
        *(word for word in (shown.short, flag, name) if word),
        **rest,
        default=default,
        show_default=default is not False and default not in ("", None, ()),
        help=shown.help,
        envvar=shown.envvar,
        cls=SectionedOption,
        is_common=shown.is_common,
        section=shown.section or (OPTIONS if shown.is_common else "Advanced options"),
    )
