"""`pageant replay`: what a scheduler was asked is asked of a fresh core, without torch, and the plans are compared."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from services.cli.command_line.help import EXISTING_FILE, SectionedCommand
from shared.errors import ProtocolError

KEPT = Path("tests/unit/scheduler/recording/recordings")  # every recording there is replayed by a test


@click.command("replay", cls=SectionedCommand)
@click.argument("file", type=EXISTING_FILE)
@click.option("--invariants", is_flag=True, help="Check the core after every event; slow.")
@click.option("--digest", "show_digest", is_flag=True, help="Print nothing but the digest over all plans.")
@click.option(
    "--keep",
    metavar="NAME",
    help=f"Copy the recording into {KEPT}: from then on the test suite replays it, invariants checked.",
)
def replay_command(file: Path, invariants: bool, show_digest: bool, keep: str | None) -> None:
    """Replay FILE, which a scheduler with --record has written; the exit status is 1 where a plan differs."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # a recording from anywhere is replayed anywhere
    from services.scheduler.invariants import check
    from services.scheduler.recording.replay import opened, replay

    try:
        with opened(file) as recording:
            replayed = replay(recording, check if invariants else None)
    except ProtocolError as error:
        raise click.ClickException(f"{file}: {error}") from error
    if keep:
        click.echo(f"kept as {kept(file, keep)}", err=True)
    if show_digest:
        click.echo(replayed.digest)
    else:
        click.echo(
            f"{replayed.num_events} events in {replayed.seconds:.1f} s, {replayed.num_requests} requests, "
            f"{replayed.num_plans} plans, digest {replayed.digest}"
        )
    if replayed.foreign:
        click.echo(f"note: {replayed.foreign}", err=True)
    if replayed.difference is not None:
        click.echo(f"differs: {replayed.difference}", err=True)
        sys.exit(1)
    click.echo("every plan is equal, byte for byte", err=True)


def kept(file: Path, name: str) -> Path:
    """Copy a recording to where the tests find it."""
    path = KEPT / f"{Path(name).stem}.rec"
    if not KEPT.parent.is_dir():
        raise click.ClickException(f"there is no {KEPT.parent} here: --keep is for a checkout of the project")
    KEPT.mkdir(exist_ok=True)
    shutil.copyfile(file, path)
    return path
