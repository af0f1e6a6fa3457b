"""What runs in a Ray actor: one process of ours, started, watched and ended where Ray has placed it.

Arguments and answers are numbers and short texts.  Ray loads this module on its nodes, so it imports little.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from services.worker.groups.rank_processes import LAUNCH
from shared.actor.status import read_status, words_path
from shared.config import PREFIX, load_settings
from shared.errors import ConfigError
from shared.ranks.handshake import group_key
from shared.transport.keys import FILE

MOST_WORDS = 2000  # characters


class RankReport(msgspec.Struct, frozen=True):
    """How a rank's process does."""

    status: int | None  # its exit status, once it has ended
    state: str  # as it says itself: READY, and others of shared.actor.status
    words: str  # why it ended, as far as it has said


class PlacedRank:
    """Ray makes an actor of this class.  The process dies with the actor, whatever ends that."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="pageant-rank-"))
        self._status_file = self._directory / "status"

    def host(self) -> str:
        """The address at which other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, command: str, environment: str, keys: str) -> str:
        """Start `python -m COMMAND` with these variables (a JSON object) beside the node's own.

        `keys`: the digest of the deployment's.  Returns why it cannot be started; empty where it was.
        """
        given: dict[str, str] = msgspec.json.decode(environment, type=dict[str, str])
        own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        variables = own | given | {f"{PREFIX}STATUS_FILE": str(self._status_file)}
        try:
            if wrong := why_not_these_keys(load_settings(environ=variables).deployment.runtime_path, keys):
                return wrong
            program = [sys.executable, "-m", *command.split()]
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(LAUNCH), str(os.getpid()), *program],
                stdin=subprocess.DEVNULL,
                env=variables,
                process_group=0,
            )
        except (OSError, ConfigError) as error:
            return str(error)
        return ""

    def look(self) -> str:
        """A RankReport as JSON."""
        status = None if self._process is None else self._process.poll()
        words = words_path(self._status_file)
        said = words.read_text(encoding="utf-8", errors="replace") if status is not None and words.is_file() else ""
        report = RankReport(status, read_status(self._status_file), said[:MOST_WORDS])
        return msgspec.json.encode(report).decode()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.Signals(number))

    def end(self) -> None:
        """End the process at once, and leave nothing behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def keys_digest(runtime_dir: Path) -> str:
    """Names the deployment's keys without telling them.  Raises ConfigError."""
    return hashlib.blake2b(group_key(runtime_dir), digest_size=16, person=b"pageant ray").hexdigest()


def why_not_these_keys(runtime_dir: Path, digest: str) -> str:
    """A process without the deployment's keys would make others, and wait for an answer for ever."""
    path = runtime_dir / FILE
    if not path.is_file():
        return f"there is no {path}: copy it from the host of `pageant serve`"
    if keys_digest(runtime_dir) != digest:
        return f"{path} holds other keys than that of the host of `pageant serve`: copy it from there"
    return ""
