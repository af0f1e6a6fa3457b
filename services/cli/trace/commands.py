"""`pageant trace`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from services.cli.command_line.help import SectionedCommand
from services.cli.trace.logs import STANDARD_INPUT, Logs, align, gather, read
from services.cli.trace.requests import RequestTrace
from services.cli.trace.where import WhereError, check_name, parse_where

MAX_LISTED = 50
writable = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command("trace", cls=SectionedCommand)
@click.argument("request", required=False)
@click.option(
    "--logs",
    "-l",
    multiple=True,
    metavar="PATH",
    help="A log file or a folder of them, '-' for standard input; may be given again.",
)
@click.option("--slowest", type=click.IntRange(min=1), metavar="N", help="List the N slowest requests.")
@click.option(
    "--by",
    default="e2e",
    show_default=True,
    help="The figure that --slowest sorts by: e2e, ttft, tpot, queue, a phase ...",
)
@click.option("--where", metavar="CONDITION", help="Only requests for which it holds: 'ttft > 500ms and status = OK'.")
@click.option("--perfetto", type=writable, help="Write them for the Perfetto viewer, in Chrome's trace-event format.")
@click.option("--html", type=writable, help="Write a report: one file, with nothing outside it.")
@click.option("--otlp", metavar="URL", help="Send them to an OpenTelemetry collector.")
def trace(
    request: str | None,
    logs: tuple[str, ...],
    slowest: int | None,
    by: str,
    where: str | None,
    perfetto: Path | None,
    html: Path | None,
    otlp: str | None,
) -> None:
    """Show where a request is, and why it was slow, from the services' JSON logs.

    REQUEST is a request id (or its beginning), a trace id, or the label that the client gave:

        docker compose logs --no-color | pageant trace 4be1

        pageant trace --logs logs/ --slowest 10 --where 'ttft > 500ms'
    """
    found = select(load(logs), request, where)
    if slowest is not None:
        with refusing("--by"):
            check_name(by, found.fields)
        found.traces = sorted(found.traces, key=lambda trace: -number(trace, by))[:slowest]
    if perfetto is not None:
        from services.cli.trace.perfetto import trace_events

        perfetto.write_bytes(msgspec.json.encode(trace_events(found)))
        click.echo(f"{perfetto}: open it at ui.perfetto.dev", err=True)
    if html is not None:
        from services.cli.trace.report import page

        html.write_text(page(found), encoding="utf-8")
        click.echo(f"{html}: {len(found.traces)} requests, {len(found.step_lines)} steps", err=True)
    if otlp is not None:
        from services.cli.trace.otlp import export

        if not otlp.startswith(("http://", "https://")):
            raise click.ClickException(f"--otlp {otlp}: expected a URL with http:// or https://")
        click.echo(f"{export(found.traces, otlp)} spans sent to {otlp}", err=True)
    if slowest is not None or not (perfetto or html or otlp):
        show(found.traces)


def load(sources: tuple[str, ...]) -> Logs:
    """The requests and steps of the logs, with all times on one clock."""
    if not sources:
        if sys.stdin.isatty():
            raise click.UsageError("say with --logs where the logs are, or pipe them in")
        sources = (STANDARD_INPUT,)
    try:
        found = gather(read(sources))
    except OSError as error:
        raise click.ClickException(f"cannot read {error.filename}: {error.strerror}") from error
    if moved := align(found):
        text = ", ".join(f"{name} {1000 * seconds:+.0f} ms" for name, seconds in sorted(moved.items()))
        click.echo(f"clocks differ; moved: {text}", err=True)
    return found


def select(logs: Logs, request: str | None, where: str | None) -> Logs:
    """The requests that were asked for; it is an error where there is none."""
    if request is not None:
        logs.traces = logs.find(request)
        if not logs.traces:
            raise click.ClickException(f"no line is about a request {request!r}")
    if where is not None:
        with refusing("--where"):
            condition = parse_where(where, logs.fields)
        logs.traces = [trace for trace in logs.traces if condition(trace.values)]
    return logs


@contextlib.contextmanager
def refusing(option: str) -> Iterator[None]:
    """A condition or a name that cannot be read ends the command with a line that names the option."""
    try:
        yield
    except WhereError as error:
        raise click.ClickException(f"{option}: {error}") from error


def number(trace: RequestTrace, name: str) -> float:
    value = trace.values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def show(traces: list[RequestTrace]) -> None:
    """One request in full, several in a line each."""
    from services.cli.trace.waterfall import table, waterfall

    if len(traces) == 1:
        click.echo(waterfall(traces[0]))
    elif traces:
        click.echo(table(traces[:MAX_LISTED]))
        if len(traces) > MAX_LISTED:
            click.echo(f"and {len(traces) - MAX_LISTED} more: with --slowest N the slowest are listed", err=True)
    else:
        click.echo("no request", err=True)
