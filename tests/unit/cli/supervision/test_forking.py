"""Real fork servers, which fork small programs of these tests."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.cli.supervision import forking
from services.cli.supervision.forking import Adoption, ForkedProcess, ForkServer, OwnChild
from services.cli.supervision.processes import start
from services.fork_server import IMPORTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux")

PROGRAM = """
import json, os, pathlib, sys, time
print(json.dumps({
    "parent": os.getppid(), "group": os.getpgrp(), "pid": os.getpid(), "own": os.environ["OWN"],
    "inherited": os.environ["INHERITED"], "arguments": sys.argv, "has_preloaded": "preloaded" in sys.modules,
}))
sys.stdout.flush()
while not pathlib.Path(os.environ["OWN"]).exists():
    time.sleep(0.005)
sys.exit(3)
"""
SUPERVISOR = """
import functools, sys, time
from services.cli.supervision.forking import Adoption, ForkServer
from services.cli.supervision.processes import start
server = ForkServer("preloaded", lambda *words: start(*words[:2], inherited=words[2]), Adoption())
child = server.fork("program", {"OWN": sys.argv[1]}, 1, 2, lambda: sys.exit("it was not forked"))
while not child.pid:
    child.poll()
    time.sleep(0.005)
print(f"<{child.pid}>", flush=True)
time.sleep(60)
"""
THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
"""
SPOILED = """
import sys

def become(*_):
    raise OSError("no group")

sys.modules["__main__"].become = become
"""
SECONDS = 20.0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Programs:
    """A fork server of this process, and what it forks."""

    def __init__(self, directory: Path, module: str = "preloaded") -> None:
        self.directory = directory
        self.end = directory / "end"  # once there is this file, programs end
        self.servers: list[subprocess.Popen[bytes]] = []
        self.adoption = Adoption()
        self.server = ForkServer(module, self._start, self.adoption)
        self.children: list[Any] = []
        self.others: list[subprocess.Popen[bytes]] = []

    def _start(
        self, command: list[str], environment: Mapping[str, str], inherited: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        self.servers.append(start(command, environment, inherited=inherited))
        return self.servers[-1]

    def fork(self) -> Any:
        with (self.directory / "out").open("wb") as out:
            child = self.server.fork("program", {"OWN": str(self.end)}, out.fileno(), out.fileno(), self.otherwise)
        self.children.append(child)
        return child

    def otherwise(self) -> subprocess.Popen[bytes]:
        self.others.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return self.others[-1]

    def said(self) -> dict[str, Any]:
        until(lambda: (self.directory / "out").read_text().endswith("\n"))
        found: dict[str, Any] = json.loads((self.directory / "out").read_text())
        return found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Programs]]:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "program" / "__init__.py").touch()
    (tmp_path / "preloaded.py").touch()
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "spoiled.py").write_text(SPOILED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("INHERITED", "yes")
    made = []

    def make(module: str = "preloaded") -> Programs:
        made.append(Programs(tmp_path, module))
        return made[-1]

    yield make
    for programs in made:
        for child in programs.children:
            child.kill()
        for child in programs.children:
            until(partial(has_ended, child))
        programs.server.close()
        for other in programs.others:
            other.kill()
            other.wait()


def test_what_is_forked_is_a_child_like_any_other(make: Callable[..., Programs]) -> None:
    programs = make()
    child = programs.fork()
    said = programs.said()
    until(partial(lives, child))
    command = [sys.executable, "-m", "program"]
    assert said == {
        "parent": os.getpid(),
        "group": said["pid"],
        "pid": child.pid,
        "own": str(programs.end),
        "inherited": "yes",
        "arguments": [said["arguments"][0]],
        "has_preloaded": True,
    }
    assert said["arguments"][0].endswith("program/__main__.py")
    assert Path(f"/proc/{child.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0") == [
        word.encode() for word in command
    ]
    assert child.poll() is None and not is_subreaper()
    programs.end.touch()
    until(lambda: child.poll() is not None)
    assert child.poll() == 3 and not programs.others


def test_a_signal_that_ends_it_is_its_status(make: Callable[..., Programs]) -> None:
    child = make().fork()
    until(partial(lives, child))
    child.kill()
    until(lambda: child.poll() is not None)
    assert child.poll() == -signal.SIGKILL
    child.send_signal(signal.SIGTERM)  # no process gets it, and no error is raised


def test_the_death_of_a_fork_server_ends_no_other_process(make: Callable[..., Programs]) -> None:
    programs = make()
    first = programs.fork()
    until(partial(lives, first))
    programs.servers[0].kill()
    programs.servers[0].wait()
    second = programs.fork()
    until(partial(lives, second))
    assert first.poll() is None and len(programs.servers) == 2 and not programs.others


def test_one_that_dies_before_it_has_forked_costs_a_start(make: Callable[..., Programs]) -> None:
    programs = make()
    programs.servers[0].send_signal(signal.SIGSTOP)
    child = programs.fork()
    assert child.poll() is None and child.pid == 0
    programs.servers[0].kill()
    until(partial(lives, child))
    assert child.pid == programs.others[0].pid and not is_subreaper()


@pytest.mark.parametrize("module", ["threaded", "broken", "spoiled"])
def test_what_cannot_fork_lets_services_be_started(make: Callable[..., Programs], module: str) -> None:
    programs = make(module)
    for number in range(2):
        child = programs.fork()
        until(partial(lives, child))
        assert child.pid == programs.others[number].pid
    command = ["pgrep", "--count", "--full", f"services.fork_server [0-9]* {module}"]
    assert int(subprocess.run(command, capture_output=True, check=False).stdout) <= 1, "no second one reads orders"


def test_how_a_child_ended_may_be_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
        assert OwnChild(process.pid).poll() == 0


def test_one_that_is_silent_is_not_waited_for_for_ever(
    make: Callable[..., Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "PATIENCE", 0.2)
    programs = make()
    programs.servers[0].send_signal(signal.SIGSTOP)
    child = programs.fork()
    until(partial(lives, child))
    assert child.pid == programs.others[0].pid and programs.servers[0].poll() == -signal.SIGKILL
    programs.fork()
    assert len(programs.servers) == 2, "another one for the next"


def test_what_is_told_to_end_before_it_began_does_not_begin(make: Callable[..., Programs]) -> None:
    programs = make()
    programs.servers[0].send_signal(signal.SIGSTOP)
    first = programs.fork()
    first.send_signal(signal.SIGTERM)
    assert first.poll() == -signal.SIGTERM and not is_subreaper()
    second = programs.fork()
    programs.servers[0].send_signal(signal.SIGCONT)
    until(partial(lives, second))
    assert programs.said()["pid"] == second.pid and first.poll() == -signal.SIGTERM and not programs.others


def test_orphans_are_adopted_while_any_is_awaited(make: Callable[..., Programs]) -> None:
    programs = make()
    programs.servers[0].send_signal(signal.SIGSTOP)
    children: list[ForkedProcess] = [programs.fork(), programs.fork()]
    children[0].kill()
    assert is_subreaper()
    children[1].kill()
    assert not is_subreaper()


def test_a_fork_at_once_finds_its_parent(make: Callable[..., Programs], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an orphan as soon as the order has come; where nothing has adopted it then, the system does, for good."""
    programs, really, seen = make(), socket.send_fds, list[bool]()

    def send(*arguments: Any) -> int:
        seen.append(is_subreaper())
        return really(*arguments)

    def cannot(*_: Any) -> int:
        raise OSError("no buffer")

    monkeypatch.setattr("socket.send_fds", send)
    child = programs.fork()
    assert seen == [True]
    until(partial(lives, child))
    monkeypatch.setattr("socket.send_fds", cannot)
    assert programs.fork() is programs.others[0] and not is_subreaper()


def test_what_cannot_be_started_either_has_ended(
    make: Callable[..., Programs], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = make("broken")

    def cannot() -> subprocess.Popen[bytes]:
        raise OSError("no memory")

    monkeypatch.setattr(programs, "otherwise", cannot)
    child = programs.fork()
    until(lambda: child.poll() is not None)
    assert child.poll() == 1 and child.pid == 0


def test_what_was_forked_dies_with_its_supervisor(make: Callable[..., Programs], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "end")], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        printed = b""
        while (found := re.search(rb"<(\d+)>", printed)) is None:  # the program prints too, also within this line
            printed += supervisor.stdout.readline()
        pid = int(found[1])
        assert Path(f"/proc/{pid}").exists()
        supervisor.kill()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("module", [IMPORTS[forking.COMMON], IMPORTS[forking.WITH_TORCH]])
def test_imports_start_no_thread_and_touch_no_gpu(module: str) -> None:
    """Else nothing could be forked, and every service would be started in the usual way."""
    code = f"import os, sys, {module}; print(len(os.listdir('/proc/self/task')), 'triton' in sys.modules)\n"
    code += "torch = sys.modules.get('torch'); print(torch is not None and torch.cuda.is_initialized())"
    environment = os.environ | forking.ONE_THREAD
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False", "False"]


def lives(child: Any) -> bool:
    return child.poll() is None and bool(child.pid)


def has_ended(child: Any) -> bool:
    return child.poll() is not None


def is_subreaper() -> bool:
    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(found))  # PR_GET_CHILD_SUBREAPER
    return bool(found.value)
