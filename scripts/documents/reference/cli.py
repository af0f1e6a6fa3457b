"""cli.md: every command of `pageant` with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from scripts.documents.reference.markdown import code, page, section, table
from services.cli.command_line.options import NAMES, SAMPLING
from services.cli.main import main

TEXT = """\
Option `-h` of a command shows its common options, `--help` all of them. Two sets of options belong to several commands
and are listed once: the settings in [settings.md](settings.md), the options of sampling at the end of this page."""
HEAD = ("option", "value", "default", "meaning")


def render() -> str:
    commands = list(walk(main, click.Context(main, info_name="pageant")))
    generate = next(command for command, _ in commands if command.name == "generate")
    sampling = section("Options of sampling", _table(one for one in generate.params if one.name in SAMPLING))
    sections = [_section(command, context) for command, context in commands]
    return page("Commands", "the commands of services/cli", TEXT, *sections, sampling)


def walk(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command that can be run, those of groups in their places."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from walk(command, inner)
        else:
            yield command, inner


def _section(command: click.Command, context: click.Context) -> str:
    names = {str(one.name) for one in command.params}
    settings = [name for name in NAMES if name in names]
    has_all_settings, has_sampling = len(settings) == len(NAMES), SAMPLING.keys() <= names
    taken = {*(settings if has_all_settings else ()), *(SAMPLING if has_sampling else ()), "help", "h"}
    own = [one for one in command.params if isinstance(one, click.Option) and one.name not in taken]
    return section(
        code(context.command_path),
        "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")),
        f"    {context.command_path} {' '.join(command.collect_usage_pieces(context))}",
        "Every setting is an option: [settings.md](settings.md)." if has_all_settings else "",
        "Takes the [options of sampling](#options-of-sampling)." if has_sampling else "",
        _table(own) if own else "",
    )


def _table(options: Iterable[click.Parameter]) -> str:
    return table(HEAD, (_row(one) for one in options if isinstance(one, click.Option)))


def _row(one: click.Option) -> tuple[str, ...]:
    names = ", ".join(code(name) for name in (*one.opts, *one.secondary_opts))
    value = "" if one.is_flag else one.make_metavar(click.Context(main))
    has_default = isinstance(one.default, str | int | float | tuple) and one.default not in ("", ()) and not one.is_flag
    text = (one.help or "").replace("  [default:", " [default:")
    if one.envvar:
        text += f" Environment: {code(str(one.envvar))}."
    if one.multiple and "again" not in text:
        text += " May be given again."
    return (names, code(value), code(str(one.default)) if has_default else "", text)
