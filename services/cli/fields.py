"""Commands whose options are the fields of a struct: its name, type, default and sentence, each written once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

from services.cli.help import SectionedOption

S = TypeVar("S", bound=msgspec.Struct)
F = TypeVar("F", bound=Callable[..., Any])
DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT, FROM_0 = click.IntRange(min=1), click.IntRange(min=0)
SHARE, NOT_NEGATIVE = click.FloatRange(0, 1), click.FloatRange(min=0)


class Shown(msgspec.Struct, frozen=True):
    """How a field is shown on the command line; to be given as its annotation."""

    help: str
    kind: Any = None  # a type of click's, where the field's own does not say enough
    is_common: bool = True
    short: str = ""
    envvar: str | None = None


def advanced(help: str, kind: Any = None) -> Shown:
    """A field whose option `-h` leaves out."""
    return Shown(help, kind, is_common=False)


def field_options(struct: type[msgspec.Struct], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Add an option for each field; `take` makes the struct of their values."""

    def add(command: F) -> F:
        for field in reversed(msgspec.structs.fields(struct)):
            if field.name not in without:
                command = _option(field)(command)
        return command

    return add


def take(struct: type[S], arguments: dict[str, Any]) -> S:
    """Remove a struct's fields from a command's arguments."""
    return struct(**{name: arguments.pop(name) for name in struct.__struct_fields__ if name in arguments})


def _option(field: msgspec.structs.FieldInfo) -> Callable[[F], F]:
    annotated, shown = get_args(field.type)
    flag = f"--{field.name.replace('_', '-')}"
    default, rest = field.default, {"type": shown.kind or annotated}
    if annotated is bool:
        rest = {"is_flag": True}
        flag += f"/--no-{flag[2:]}" if field.default else ""
    elif get_origin(annotated) is Literal:
        rest = {"type": click.Choice(get_args(annotated))}
    elif get_origin(annotated) is tuple:
        rest = {"multiple": True}
    elif isinstance(shown.kind, Listed) and field.default is not None:
        default = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in field.default)
    names = [name for name in (shown.short, flag, field.name) if name]
    return click.option(
        *names,
        **rest,
        default=default,
        show_default=default is not False and default not in ("", None, ()),
        help=shown.help,
        envvar=shown.envvar,
        cls=SectionedOption,
        is_common=shown.is_common,
        section="Options" if shown.is_common else "Advanced options",
    )


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
