"""Help pages: every option has its sentence, in its section; a command lists its own options alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from services.cli.main import main
from shared.config import Settings, places
from shared.config.catalogue import catalogue


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, (*path, name))


def help_of(*arguments: str) -> str:
    """A help page, each entry in one line."""
    return CliRunner().invoke(main, [*arguments], terminal_width=2000, max_content_width=2000).output


def flags(page: str) -> set[str]:
    """The options that have an entry of their own."""
    return {
        flag
        for entry in re.findall(r"^  (-.*?)(?:  |$)", page, re.MULTILINE)
        for flag in re.findall("--[a-z-]+", entry)
    }


@pytest.mark.parametrize("path", [" ".join(path) for path, _ in commands(main)])
def test_every_option_of_every_command_has_a_sentence(path: str) -> None:
    command = dict(commands(main))[tuple(path.split())]
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert command.help
    page = " ".join(help_of(*path.split(), "--help").split())
    for option in options:
        assert option.help and len(option.help) > 5, f"{path} {option.opts}"
        assert max(option.opts, key=len) in page and " ".join(option.help.split()) in page


@pytest.mark.parametrize("name", ["serve", "doctor", "quickstart"])
def test_common_settings_come_before_advanced_ones_which_h_leaves_out(name: str) -> None:
    page, short = help_of(name, "--help"), help_of(name, "-h")
    assert page.index("Common settings:") < page.index("Advanced settings: Model:")
    common, advanced = page.split("Advanced settings:", 1)
    for setting in catalogue():
        flag = f"--{setting.name.replace('_', '-')} "
        assert (flag in common) is setting.is_common and (flag in advanced) is not setting.is_common
        assert (flag in short) is setting.is_common
    assert "advanced options more" in short and "advanced options more" not in page


@pytest.mark.parametrize("name", ["scale", "restart"])
def test_orders_list_only_what_finds_the_deployment(name: str) -> None:
    assert flags(help_of(name, "--help")) == {"--config", "--runtime-dir", "--help"}


def test_a_default_is_shown() -> None:
    page = help_of("serve", "--help")
    assert "[default: 16 Mi]" in page and "[default: prefix_aware]" in page and "[default: true]" in page


def test_every_setting_is_in_the_catalogue_with_a_sentence() -> None:
    settings = catalogue()
    assert [setting.name for setting in settings] == list(places())
    for setting in settings:
        assert setting.sentence.endswith(".") and len(setting.sentence.split()) > 1, setting.name
        assert setting.topic and setting.default == Settings().flat()[setting.name]
    assert 15 < sum(setting.is_common for setting in settings) < 35, "a list that is read at once"
