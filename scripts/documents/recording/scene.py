"""The scene: `pageant serve`, one greedy answer undisturbed, and the same one while its only worker is killed.

Every line is what a program printed, or a command that was run, at the time at which that happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scripts.bench.common.proc import processor, service_pids
from services.cli.addresses import free_port

ROOT = Path(__file__).resolve().parents[3]
MODEL = "models/pageant-stories"
SERVE = ["serve", MODEL, "--log-dir", "logs"]
ASK = ["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "400"]
FIRST, SECOND = "undisturbed.txt", "killed.txt"
DIFF = ["diff", FIRST, SECOND]
KILL_AFTER = 160  # characters of the answer
COMMAND = "scripts/record_demo"
READY_SECONDS, END_SECONDS = 90.0, 60.0
CLIENT, OPERATOR = "client", "operator"


class SceneEvent(msgspec.Struct):
    """Text that appeared in one of the two windows; `at` counts from the beginning, in seconds."""

    at: float
    window: str
    text: str


class Scene(msgspec.Struct):
    """What happened."""

    date: str
    machine: str
    command: str
    killed_at: float
    events: list[SceneEvent]
    undisturbed: str
    killed: str
    status_of_diff: int

    @property
    def pause(self) -> float:
        """Seconds from the kill to the next text of the answer."""
        return (
            min(one.at for one in self.events if one.window == CLIENT and one.at > self.killed_at + 0.1)
            - self.killed_at
        )


class ScenePlayer:
    """A directory in which the commands run, and the deployment that they speak to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "models").symlink_to(ROOT / "models")
        port = free_port()
        own = {"RUNTIME_DIR": str(directory / "run"), "PORT": str(port), "HTTP_PORT": "-1"}
        own |= {"ADDRESS": f"127.0.0.1:{port}"}
        python_path = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._environment = os.environ | {f"PAGEANT_{name}": value for name, value in own.items()} | python_path
        self._began = time.monotonic()
        self.events: list[SceneEvent] = []

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        """`pageant` with these words."""
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", *words],
            cwd=self.directory, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def show(self, window: str, text: str) -> None:
        self.events.append(SceneEvent(round(self.now(), 3), window, text))

    def now(self) -> float:
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Time counts from here, and what happened until now happened at 0."""
        self._began = time.monotonic()
        for one in self.events:
            one.at = 0.0


def play(directory: Path, *options: str) -> Scene:
    """The whole scene, with further options of the answers.  Raises RuntimeError where something went differently."""
    stage = ScenePlayer(directory)
    stage.show(OPERATOR, f"$ pageant {' '.join(SERVE)}\n")
    with stage.start(SERVE) as server:
        ready = threading.Event()
        follower = threading.Thread(target=_follow, args=(stage, server, ready), daemon=True)
        follower.start()
        try:
            if not ready.wait(READY_SECONDS) or server.poll() is not None:
                raise RuntimeError("pageant serve did not get ready")
            found = _two_answers(stage, server, [*ASK, *options])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(END_SECONDS)
        follower.join(END_SECONDS)
    return found


def _two_answers(stage: ScenePlayer, server: subprocess.Popen[bytes], ask: list[str]) -> Scene:
    stage.begin()
    first = _answer(stage, ask, FIRST)
    time.sleep(1.0)
    killed_at: list[float] = []
    second = _answer(stage, ask, SECOND, lambda: killed_at.append(_kill(stage, server)))
    if not killed_at:
        raise RuntimeError("the answer was over before the worker could be killed")
    stage.show(CLIENT, f"$ {' '.join(DIFF)} && echo no difference\n")
    diff = subprocess.run(DIFF, cwd=stage.directory, capture_output=True, text=True, check=False)
    stage.show(CLIENT, diff.stdout if diff.returncode else "no difference\n")
    today = datetime.now(UTC).date().isoformat()
    return Scene(today, processor(), COMMAND, killed_at[0], [*stage.events], first, second, diff.returncode)


def _follow(stage: ScenePlayer, server: subprocess.Popen[bytes], ready: threading.Event) -> None:
    """Show that the server is ready, and what it says later."""
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith(b"pageant:" if ready.is_set() else b"ready:"):
            stage.show(OPERATOR, line.decode())
            ready.set()
    ready.set()  # the server has ended: the main thread stops waiting for it


def _answer(stage: ScenePlayer, ask: list[str], file: str, in_the_middle: Callable[[], None] | None = None) -> str:
    """One completion, shown as it comes and kept in a file."""
    stage.show(CLIENT, f"$ pageant {' '.join(_quoted(word) for word in ask)} | tee {file}\n")
    text = b""
    with stage.start(ask) as client:
        assert client.stdout is not None and client.stderr is not None
        while piece := os.read(client.stdout.fileno(), 65536):
            text += piece
            stage.show(CLIENT, piece.decode())
            if in_the_middle is not None and len(text) > KILL_AFTER:
                in_the_middle()
                in_the_middle = None
        said = client.stderr.read().decode()
    if client.returncode:
        raise RuntimeError(said)
    (stage.directory / file).write_bytes(text)
    return text.decode()


def _kill(stage: ScenePlayer, server: subprocess.Popen[bytes]) -> float:
    """SIGKILL to the worker, which is a child of the server; returns when."""
    (pid,) = service_pids(server.pid, "worker")
    os.kill(pid, signal.SIGKILL)
    at = stage.now()
    stage.show(OPERATOR, f"$ kill -9 {pid}    # the worker\n")
    return at


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word
