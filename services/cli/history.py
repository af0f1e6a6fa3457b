"""Line editing at a prompt, and the lines of earlier times, in a file that only their user can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 1000


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
            _keep_private(path)
            readline.write_history_file(path)
        readline.clear_history()


def _keep_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    path.chmod(0o600)
