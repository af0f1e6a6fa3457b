"""`pageant generate` and `pageant chat`: text streamed as it is made, and line editing at the prompt."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import grpc

from services.cli.display.client import TerminalClient, printable
from services.cli.display.client import explain as in_words

BAR = 40  # characters
MAX_TOKENS = 256  # of a completion, unless the option is given; the end of the sequence may come before
HOW_TO_LEAVE = "Ctrl-D or /quit ends; Ctrl-C stops an answer"
MAX_LINES = 1000


def write(text: str) -> None:
    """To standard output, at once; a terminal gets no control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def generate(client: TerminalClient, prompt: str, sampling: dict[str, Any], *, explain: bool = False) -> int:
    """Stream one completion to its end, then its figures; returns the exit status."""
    length = {"max_tokens": max(MAX_TOKENS, sampling.get("min_tokens", 0))}
    try:
        _, figures = client.generate(length | sampling, write, text=prompt, explain=explain)
    except grpc.RpcError as error:
        click.echo(f"pageant: {in_words(error, client.address)}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("", err=True)
        return 130
    write("\n")
    click.echo(str(figures), err=True)
    if figures.explanation is not None:
        click.echo(explained(figures.explanation), err=True)
    return 0


def explained(explanation: Any) -> str:
    """A line for each phase, with a bar as long as its part of the whole, and the cause."""
    phases = [(entry.phase, entry.ms) for entry in explanation.phases]
    width, total = max((len(name) for name, _ in phases), default=0), sum(ms for _, ms in phases) or 1.0
    lines = [f"{name:<{width}}  {ms:>10.2f} ms  {'#' * round(BAR * ms / total)}".rstrip() for name, ms in phases]
    misses = ", ".join(f"{entry.tokens} {entry.reason}" for entry in explanation.misses)
    return "\n".join([*lines, *([f"prompt tokens computed: {misses}"] if misses else []), explanation.cause])


def chat(client: TerminalClient, system: str, sampling: dict[str, Any]) -> int:
    """Talk until /quit or the end of the input.  Ctrl-C stops one answer."""
    messages = [{"role": "system", "content": system}] if system else []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(HOW_TO_LEAVE, err=True)
    with line_editing(history_path()) if is_terminal else contextlib.nullcontext():
        while (line := _read_line()) is not None:
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            answer = _answer(client, messages, sampling)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str | None:
    """A line of input; empty after Ctrl-C, None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        write("\n" if sys.stdin.isatty() else "")
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        click.echo(f"\n{HOW_TO_LEAVE}", err=True)
        return ""
    return None if line == "/quit" else line


def _answer(client: TerminalClient, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str | None:
    """One answer, or None where there was none; an interrupted answer counts as far as it came."""
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        write(text)

    try:
        _, figures = client.generate(sampling, show, chat={"messages": messages})
    except grpc.RpcError as error:
        click.echo(f"pageant: {in_words(error, client.address)}", err=True)
        return None
    except KeyboardInterrupt:
        write("\n")
        return "".join(said) or None
    write("\n")
    click.echo(str(figures), err=True)
    return "".join(said)


def history_path() -> Path:
    """In the user's directory for state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "pageant" / "chat_history"


@contextlib.contextmanager
def line_editing(path: Path) -> Iterator[None]:
    """`input` edits its line within, and knows the lines of `path`; a Python without readline has neither.

    A history that cannot be read or written is done without.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_history_length(MAX_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            path.chmod(0o600)
            readline.write_history_file(path)
        readline.clear_history()
