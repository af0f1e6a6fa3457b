"""The commands.  What a command needs is imported when it runs, so that each starts fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from services.cli.bench.commands import bench, simulate
from services.cli.help import Group
from services.cli.options import deployment_options, sampling_options, settings_options, take_sampling, take_settings
from services.cli.replay import replay_command
from services.cli.top import top
from services.cli.trace.commands import trace

address_option = click.option(
    "--address",
    default="127.0.0.1:50051",
    envvar="PAGEANT_ADDRESS",
    show_default=True,
    help="Where the gateway listens for gRPC.",
)
key_option = click.option("--api-key", default="", envvar="PAGEANT_API_KEY", help="A key, if the server asks for one.")
authority_option = click.option(
    "--tls-ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="PAGEANT_TLS_CA",
    help="Speak TLS, and trust the authorities in this PEM file.",
)
replicas = click.IntRange(min=1)
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "draft", "detokenizer")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="pageant")
def main() -> None:
    """LLM inference as a troupe of services."""


main.add_command(bench)
main.add_command(simulate)
main.add_command(replay_command)
main.add_command(trace)
main.add_command(top)


@main.command()
@click.argument("directory", required=False)
@settings_options
@click.option("--workers", type=replicas, default=1, show_default=True, help="Worker replicas.")
@click.option("--drafts", type=replicas, default=1, show_default=True, help="Draft replicas, unless --draft is off.")
@click.option("--tokenizers", type=replicas, default=1, show_default=True, help="Tokenizer replicas.")
@click.option("--detokenizers", type=replicas, default=1, show_default=True, help="Detokenizer replicas.")
@click.option("--gateways", type=replicas, default=1, show_default=True, help="Gateway replicas, at ports in a row.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="A log file per process here.")
def serve(
    directory: str | None,
    workers: int,
    drafts: int,
    tokenizers: int,
    detokenizers: int,
    gateways: int,
    log_dir: Path | None,
    **arguments: Any,
) -> None:
    """Serve a model: every service as a process of this machine, restarted when it dies.

    DIRECTORY is the model, as with --model.
    """
    from services.cli import serve as command

    arguments["model"] = one_model(directory, arguments["model"])
    settings = take_settings(arguments)
    cast = command.roles(
        settings, workers=workers, drafts=drafts, tokenizers=tokenizers, detokenizers=detokenizers, gateways=gateways
    )
    sys.exit(command.serve(settings, cast, log_dir))


def one_model(directory: str | None, model: str | None) -> str | None:
    """A model may be named in two ways, but not two models."""
    if directory is not None and model is not None and directory != model:
        raise click.UsageError(f"the model is {directory!r} or --model {model!r}, not both")
    return directory if directory is not None else model


@main.command()
@click.argument("services", nargs=-1, type=click.Choice(SERVICES))
@deployment_options
def restart(services: tuple[str, ...], **arguments: Any) -> None:
    """Replace every process of a running `pageant serve` in turn, or those of SERVICES; streams go on."""
    from services.cli import orders

    order = orders.SupervisorOrder(restart=list(services or SERVICES))
    sys.exit(orders.give(take_settings(arguments).deployment, order))


@main.command()
@click.argument("replicas", nargs=-1, required=True, metavar="SERVICE=COUNT ...")
@deployment_options
def scale(replicas: tuple[str, ...], **arguments: Any) -> None:
    """Set the number of replicas of services of a running `pageant serve`: `pageant scale worker=2 tokenizer=3`."""
    from services.cli import orders

    settings = take_settings(arguments)
    try:
        counts = {service: int(count) for service, _, count in (word.partition("=") for word in replicas)}
    except ValueError as error:
        raise click.ClickException("replicas are given as SERVICE=COUNT") from error
    sys.exit(orders.give(settings.deployment, orders.SupervisorOrder(scale=counts)))


@main.command()
@click.argument("prompt")
@address_option
@key_option
@authority_option
@sampling_options
@click.option("--explain", is_flag=True, help="Print the time of the request by phase.")
def generate(prompt: str, address: str, api_key: str, tls_ca: Path | None, explain: bool, **arguments: Any) -> None:
    """Complete PROMPT, streaming ('-' reads it from standard input)."""
    from services.cli import terminal
    from services.cli.client import TerminalClient

    text = sys.stdin.read() if prompt == "-" else prompt
    client = TerminalClient(address, key=api_key, authority=tls_ca.read_bytes() if tls_ca else None)
    sys.exit(terminal.generate(client, text, take_sampling(arguments), explain=explain))


@main.command()
@address_option
@key_option
@authority_option
@click.option("--system", default="", help="A system message to begin with.")
@sampling_options
def chat(address: str, api_key: str, tls_ca: Path | None, system: str, **arguments: Any) -> None:
    """Talk with the model; /quit ends it."""
    from services.cli import terminal
    from services.cli.client import TerminalClient

    client = TerminalClient(address, key=api_key, authority=tls_ca.read_bytes() if tls_ca else None)
    sys.exit(terminal.chat(client, system, take_sampling(arguments)))


@main.command()
@click.argument("prompt", default="Once upon a time")
@settings_options
@sampling_options
def quickstart(prompt: str, **arguments: Any) -> None:
    """Complete PROMPT with a private deployment, which is stopped afterwards."""
    from services.cli import quickstart as command

    settings = take_settings(arguments)
    sys.exit(command.quickstart(settings, prompt, take_sampling(arguments)))


@main.command()
@settings_options
def doctor(**arguments: Any) -> None:
    """Check whether this machine can serve, and show device, types, memory plan and ports."""
    from services.cli.doctor import doctor as examine_all

    sys.exit(examine_all(take_settings(arguments)))
