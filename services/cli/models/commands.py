"""`pageant model`: the models of a running `pageant serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from services.cli.command_line.help import Group
from services.cli.command_line.options import deployment_options, take_settings
from shared.errors import ConfigError


@click.group(cls=Group)
def model() -> None:
    """List, add, remove and swap the models of a running `pageant serve`; requests go on."""


@model.command("list")
@deployment_options
def list_models(**arguments: Any) -> None:
    """Show the models, and which are in memory."""
    _give(arguments, action="list")


@model.command()
@click.argument("name")
@click.argument("directory")
@click.option("--alias", "aliases", multiple=True, help="Another name of it; may be given again.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker replicas.")
@click.option("--asleep", is_flag=True, help="Load it with the first request only.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of this model alone.")
@deployment_options
def add(
    name: str, directory: str, aliases: tuple[str, ...], workers: int, asleep: bool, settings: tuple[str, ...],
    **arguments: Any,
) -> None:  # fmt: skip
    """Serve one more model, NAME, from DIRECTORY."""
    from services.cli.checks.models import check_model
    from shared.config import EngineSettings, read_table

    if Path(directory).is_dir():  # as this process sees it, not the one that gets the order
        directory = str(Path(directory).resolve())
    finding, _ = check_model(directory, "model", EngineSettings())
    if finding.verdict == "wrong":
        raise click.ClickException(finding.text)
    given = dict(_pair(word) for word in settings)
    own = {"model": directory, "aliases": list(aliases), "workers": workers, "asleep": asleep}
    try:
        made = read_table(name, {**given, **own})
    except ConfigError as error:
        raise click.ClickException(str(error).removeprefix(f"models.{name}: ")) from error
    _give(arguments, action="add", model=made)


@model.command()
@click.argument("name")
@click.option("--seconds", type=float, help="Time that its requests have to end.  [default: handover_timeout]")
@deployment_options
def remove(name: str, seconds: float | None, **arguments: Any) -> None:
    """Serve NAME no more, once its requests have ended."""
    _give(arguments, action="remove", name=name, seconds=seconds)


@model.command()
@click.argument("name")
@click.option("--out", multiple=True, help="The model that leaves memory; may be given again.  [default: all others]")
@click.option("--seconds", type=float, help="Time that its requests have to end.  [default: handover_timeout]")
@deployment_options
def swap(name: str, out: tuple[str, ...], seconds: float | None, **arguments: Any) -> None:
    """Have NAME in memory in place of the others; requests of these wait, and go on when they are back."""
    _give(arguments, action="swap", name=name, out=list(out) or None, seconds=seconds)


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise click.ClickException(f"--set {word!r} is not NAME=VALUE")
    return name.replace("-", "_"), value


def _give(arguments: dict[str, Any], **order: Any) -> None:
    from services.cli.supervision import orders
    from shared.processes.supervision import DONE, ModelOrder, SupervisorOrder

    deployment = take_settings(arguments).deployment
    given = SupervisorOrder(model=ModelOrder(**order))

    def show(line: str) -> None:
        if line != DONE:
            click.echo(line)

    sys.exit(orders.give(deployment, given, show))
