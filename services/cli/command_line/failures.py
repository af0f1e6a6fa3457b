"""The error that ended a command, in one line, and its exit status."""

from __future__ import annotations

import contextlib
import errno
import sys

import click

from shared.errors import ConfigError, ModelError, PageantError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL, EXIT_INTERRUPTED

MAX_CHARS = 500


def end(error: BaseException) -> int:
    """Print the error; returns the exit status."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return EXIT_INTERRUPTED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        with contextlib.suppress(OSError):
            error.show()
        return error.exit_code
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return 1  # the reader of our output has seen enough
    if sys.flags.dev_mode:
        raise error
    say(words(error))
    if isinstance(error, (ConfigError, ModelError)):
        return EXIT_CONFIG
    return 1 if isinstance(error, (PageantError, OSError)) else EXIT_FATAL


def words(error: BaseException) -> str:
    if isinstance(error, PageantError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"a defect: {type(error).__name__}: {error} (python -X dev -m services.cli ... shows where)"


def say(text: str) -> None:
    """One line on standard error; an error of writing it is ignored."""
    with contextlib.suppress(OSError):
        click.echo(f"pageant: {one_line(text)}", err=True)


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]} ..."
