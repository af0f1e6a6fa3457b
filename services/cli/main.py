"""The commands.  What a command needs is imported when it runs, so that each starts fast."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from services.cli.command_line.help import DIRECTORY, EXISTING_FILE, Group, Shown, field_options, take
from services.cli.command_line.options import (
    deployment_options,
    sampling_options,
    settings_options,
    take_configuration,
    take_sampling,
    take_settings,
)
from services.cli.supervision.supervisor import Replicas
from shared.processes.supervision import FEWEST, SupervisorOrder

if TYPE_CHECKING:
    from services.cli.display.client import TerminalClient

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
ELSEWHERE = {
    "bench": "services.cli.bench.commands:bench",
    "model": "services.cli.models.commands:model",
    "replay": "services.cli.replay:replay_command",
    "simulate": "services.cli.bench.commands:simulate",
    "top": "services.cli.display.top:top",
    "trace": "services.cli.trace.commands:trace",
}


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """How a running gateway is reached."""

    address: Annotated[str, Shown("Where the gateway listens for gRPC.", envvar="PAGEANT_ADDRESS")] = "127.0.0.1:50051"
    api_key: Annotated[str, Shown("A key, if the server asks for one.", envvar="PAGEANT_API_KEY")] = ""
    tls_ca: Annotated[
        Path | None,
        Shown("Speak TLS, and trust the authorities in this PEM file.", EXISTING_FILE, envvar="PAGEANT_TLS_CA"),
    ] = None

    def client(self) -> TerminalClient:
        from services.cli.display.client import TerminalClient

        authority = self.tls_ca.read_bytes() if self.tls_ca else None
        return TerminalClient(self.address, key=self.api_key, authority=authority)


@click.group(cls=Group, elsewhere=ELSEWHERE, context_settings=CONTEXT)
@click.version_option(package_name="pageant")
def main() -> None:
    """LLM inference as separate services."""


@main.command()
@click.argument("directory", required=False)
@settings_options
@field_options(Replicas)
@click.option("--log-dir", type=DIRECTORY, help="A log file per process here.")
def serve(directory: str | None, log_dir: Path | None, **arguments: Any) -> None:
    """Serve a model: every service as a process of this machine, restarted when it dies.

    DIRECTORY is the model, as with --model.
    """
    from services.cli.supervision.processes import start_fork_servers

    with closing(start_fork_servers()) as fork_servers:  # which import torch from now on
        from services.cli import serve as command

        replicas = take(Replicas, arguments)
        arguments["model"] = one_model(directory, arguments["model"])
        found = take_configuration(arguments)
        if found.workers is not None:
            replicas = msgspec.structs.replace(replicas, workers=found.workers)
        cast = command.roles(found.settings, replicas)
        status = command.serve(found.settings, cast, log_dir, found.models, replicas.worker_roles, fork_servers)
    sys.exit(status)


@main.command()
@click.argument("directory", required=False)
@click.option("--join", "address", required=True, metavar="tcp://HOST:PORT", help="Where the worker waits for ranks.")
@click.option("--rank", "number", type=click.IntRange(1), help="Which rank this is. Default: the first that is free.")
@settings_options
def rank(directory: str | None, address: str, number: int | None, **arguments: Any) -> None:
    """Be one rank of a worker that another host leads (`pageant serve --executor hosts`), as often as its group begins.

    DIRECTORY is the model on this host, as with --model; most other settings are the leader's. Both hosts need the same
    keys: the file curve.json in --runtime-dir.
    """
    from services.cli.rank import keep_rank
    from shared.ranks.addresses import read_address

    read_address(address)
    arguments["model"] = one_model(directory, arguments["model"])
    sys.exit(keep_rank(take_settings(arguments), address, number))


def one_model(directory: str | None, model: str | None) -> str | None:
    """A model may be named in two ways, but not two models."""
    if directory is not None and model is not None and directory != model:
        raise click.UsageError(f"the model is {directory!r} or --model {model!r}, not both")
    return directory if directory is not None else model


@main.command()
@click.argument("services", nargs=-1, type=click.Choice(list(FEWEST)))
@deployment_options
def restart(services: tuple[str, ...], **arguments: Any) -> None:
    """Replace every process of a running `pageant serve` in turn, or those of SERVICES; streams go on."""
    from services.cli.supervision import orders

    order = SupervisorOrder(restart=list(services or FEWEST))
    sys.exit(orders.give(take_settings(arguments).deployment, order))


@main.command()
@click.argument("replicas", nargs=-1, required=True, metavar="SERVICE=COUNT ...")
@deployment_options
def scale(replicas: tuple[str, ...], **arguments: Any) -> None:
    """Set the number of replicas of services of a running `pageant serve`: `pageant scale worker=2 tokenizer=3`."""
    from services.cli.supervision import orders

    settings = take_settings(arguments)
    try:
        counts = {service: int(count) for service, _, count in (word.partition("=") for word in replicas)}
    except ValueError as error:
        raise click.ClickException("replicas are given as SERVICE=COUNT") from error
    sys.exit(orders.give(settings.deployment, SupervisorOrder(scale=counts)))


@main.command()
@click.argument("prompt")
@field_options(Connection)
@sampling_options
@click.option("--explain", is_flag=True, help="Print the time of the request by phase.")
def generate(prompt: str, explain: bool, **arguments: Any) -> None:
    """Complete PROMPT, streaming ('-' reads it from standard input)."""
    from services.cli.display import terminal

    text = sys.stdin.read() if prompt == "-" else prompt
    client = take(Connection, arguments).client()
    sys.exit(terminal.generate(client, text, take_sampling(arguments), explain=explain))


@main.command()
@field_options(Connection)
@click.option("--system", default="", help="A system message to begin with.")
@sampling_options
def chat(system: str, **arguments: Any) -> None:
    """Talk with the model; /quit ends it."""
    from services.cli.display import terminal

    sys.exit(terminal.chat(take(Connection, arguments).client(), system, take_sampling(arguments)))


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("agent", type=click.Choice(("codex", "claude")))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", default="http://127.0.0.1:8000", envvar="PAGEANT_URL", show_default=True, help="The server.")
@click.option("--api-key", default="", envvar="PAGEANT_API_KEY", help="A key, if the server asks for one.")
@click.option("--model", "model", default="", help="The model, if the server has several.")
@click.option("--show", is_flag=True, help="Print the command instead of running it.")
def launch(agent: str, arguments: tuple[str, ...], url: str, api_key: str, model: str, show: bool) -> None:
    """Run a coding agent against a running server: Codex CLI or Claude Code.

    ARGUMENTS are the agent's own.
    """
    from services.cli import agents

    agents.launch(agent, url, api_key, model, arguments, shows=show)


@main.command()
@click.argument("prompt", default="Once upon a time")
@settings_options
@sampling_options
def quickstart(prompt: str, **arguments: Any) -> None:
    """Complete PROMPT with a private deployment, which is stopped afterwards."""
    from services.cli.supervision import private

    settings = take_settings(arguments)
    sys.exit(private.quickstart(settings, prompt, take_sampling(arguments)))


@main.command()
@settings_options
def doctor(**arguments: Any) -> None:
    """Check whether this machine can serve, and show device, types, memory plan and ports."""
    from services.cli.doctor import doctor as examine_all

    found = take_configuration(arguments)
    sys.exit(examine_all(found.settings, found.models))
