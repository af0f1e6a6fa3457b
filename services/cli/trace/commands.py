"""`pageant trace`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from services.cli.help import command
from services.cli.trace.clocks import align
from services.cli.trace.reading import STANDARD_INPUT, read
from services.cli.trace.requests import Logs, RequestTrace, gather
from services.cli.trace.where import WhereError, check_name, parse_where

MAX_LISTED = 50
CLOCKS_APART = 0.001  # seconds that are worth a word
writable = click.Path(dir_okay=False, writable=True, path_type=Path)


@command("trace")
@click.argument("request", required=False)
@click.option(
    "--logs", "-l", multiple=True, metavar="PATH", help="A log file or a folder of them, '-' for standard input; again."
)
@click.option("--slowest", type=click.IntRange(min=1), metavar="N", help="List the N slowest requests.")
@click.option(
    "--by", default="e2e", show_default=True, help="What --slowest goes by: e2e, ttft, tpot, queue, a phase ..."
)
@click.option("--where", metavar="CONDITION", help="Only requests for which it holds: 'ttft>500ms and status=OK'.")
@click.option("--perfetto", type=writable, help="Write them for the Perfetto viewer, in Chrome's trace-event format.")
@click.option("--html", type=writable, help="Write a report: one file, with nothing outside it.")
@click.option("--otlp", metavar="URL", help="Send them to an OpenTelemetry collector (needs the extra 'otlp').")
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
        check_by(by, found)
        found.traces = sorted(found.traces, key=lambda trace: -number(trace, by))[:slowest]
    if perfetto is not None:
        write_perfetto(found, perfetto)
    if html is not None:
        write_html(found, html)
    if otlp is not None:
        send_otlp(found, otlp)
    if slowest is not None or not (perfetto or html or otlp):
        show(found.traces)


def load(sources: tuple[str, ...]) -> Logs:
    """What the logs tell, with all times on one clock."""
    if not sources:
        if sys.stdin.isatty():
            raise click.UsageError("say with --logs where the logs are, or pipe them in")
        sources = (STANDARD_INPUT,)
    try:
        found = gather(read(sources))
    except OSError as error:
        raise click.ClickException(f"cannot read {error.filename}: {error.strerror}") from error
    moved = {name: seconds for name, seconds in align(found).items() if abs(seconds) >= CLOCKS_APART}
    if moved:
        text = ", ".join(f"{name} {1000 * seconds:+.0f} ms" for name, seconds in sorted(moved.items()))
        click.echo(f"clocks are apart; moved: {text}", err=True)
    return found


def select(logs: Logs, request: str | None, where: str | None) -> Logs:
    """The requests that were asked for; it is an error where there is none."""
    if request is not None:
        logs.traces = logs.find(request)
        if not logs.traces:
            raise click.ClickException(f"no line tells of a request {request!r}")
    if where is not None:
        try:
            condition = parse_where(where, logs.fields)
        except WhereError as error:
            raise click.ClickException(f"--where: {error}") from error
        logs.traces = [trace for trace in logs.traces if condition(trace.values)]
    return logs


def check_by(name: str, logs: Logs) -> None:
    try:
        check_name(name, logs.fields)
    except WhereError as error:
        raise click.ClickException(f"--by: {error}") from error


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


def write_perfetto(logs: Logs, path: Path) -> None:
    from services.cli.trace.perfetto import trace_events

    path.write_bytes(msgspec.json.encode(trace_events(logs)))
    click.echo(f"{path}: open it at ui.perfetto.dev", err=True)


def write_html(logs: Logs, path: Path) -> None:
    from services.cli.trace.report import page

    path.write_text(page(logs), encoding="utf-8")
    click.echo(f"{path}: {len(logs.traces)} requests, {len(logs.steps)} steps", err=True)


def send_otlp(logs: Logs, url: str) -> None:
    try:
        from services.cli.trace.otlp import export
    except ImportError as error:
        raise click.ClickException(f"--otlp needs the extra: pip install 'pageant[otlp]' ({error})") from error
    click.echo(f"{export(logs.traces, url)} spans sent to {url}", err=True)
