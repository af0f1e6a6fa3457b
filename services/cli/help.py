"""Help pages: `-h` shows a command's common options, `--help` all of them in sections.

An option says in which section it stands and whether it is a common one; options of other kinds are common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = "Options"
IS_SHORT = "pageant.is_short_help"


class SectionedOption(click.Option):
    """An option that belongs to a section of the help page."""

    def __init__(self, *args: Any, section: str = OPTIONS, is_common: bool = True, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.section = section
        self.is_common = is_common


def command(name: str) -> Callable[[Callable[..., Any]], SectionedCommand]:
    """`click.command` for a command outside a group's own module."""
    return click.command(name, cls=SectionedCommand)


class SectionedCommand(click.Command):
    """A command whose options are listed in sections, the common ones first."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        if not all(map(_is_common, self.params)):
            self.params.append(_short_help())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        num_left_out = 0
        for param in sorted(self.get_params(ctx), key=lambda param: not _is_common(param)):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if ctx.meta.get(IS_SHORT) and not _is_common(param):
                num_left_out += 1
            else:
                sections.setdefault(_section(param), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if num_left_out:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help` shows {num_left_out} advanced options more.")


class Group(click.Group):
    """A group of such commands."""

    command_class = SectionedCommand
    group_class = type


def _is_common(param: click.Parameter) -> bool:
    return param.is_common if isinstance(param, SectionedOption) else True


def _section(param: click.Parameter) -> str:
    return param.section if isinstance(param, SectionedOption) else OPTIONS


def _short_help() -> click.Option:
    return click.Option(
        ["-h"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_short_help,
        help="Show the common options and exit.",
    )


def _show_short_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[IS_SHORT] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
