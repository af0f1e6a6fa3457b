"""The supervisor over real, short-lived Python processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.supervision.processes import last_words, start
from services.cli.supervision.supervisor import Role, Supervisor
from shared.processes.exit_status import EXIT_CONFIG

PATIENT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); "
ROLE = Role("worker")


def until(condition: Callable[[], bool], supervisor: Supervisor | None = None) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        if supervisor is not None:
            supervisor.poll()
        time.sleep(0.01)


def troupe(code: str, log: Path) -> tuple[Supervisor, list[str]]:
    reports: list[str] = []

    def begin(_: Role) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-S", "-c", code], dict(os.environ), log)

    supervisor = Supervisor([ROLE], begin, report=reports.append)
    supervisor.start()
    return supervisor, reports


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_process_comes_back(tmp_path: Path) -> None:
    supervisor, reports = troupe(PATIENT + "time.sleep(60)", tmp_path / "log")
    child = supervisor.children[0]
    until(lambda: "up" in text(tmp_path / "log"))
    assert child.process is not None
    child.process.kill()
    until(lambda: text(tmp_path / "log").count("up") == 2, supervisor)
    assert reports == ["worker-0 ended with status -9; starting again in 0.1 s"]
    supervisor.stop(5)
    assert child.process.poll() == 0


def test_a_configuration_error_ends_the_supervision(tmp_path: Path) -> None:
    supervisor, reports = troupe(f"raise SystemExit({EXIT_CONFIG})", tmp_path / "log")
    until(lambda: supervisor.failure is not None, supervisor)
    assert supervisor.failure == (ROLE, EXIT_CONFIG) and not reports


def test_children_do_not_outlive_their_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(60)"
    parent = (
        "import os, sys, time\n"
        "from services.cli.supervision.processes import start\n"
        f"start([sys.executable, '-S', '-c', {child!r}], dict(os.environ))\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    until(lambda: text(pid_file).endswith("."))
    pid = int(text(pid_file).rstrip("."))
    assert alive(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(pid))


def test_children_share_our_session_and_not_our_process_group(tmp_path: Path) -> None:
    """A session of their own would be a share of the cores of their own, whatever their priority."""
    log = tmp_path / "log"
    code = "import os, signal; print(os.getsid(0), os.getpgid(0) == os.getpid(), signal.getsignal(signal.SIGTTOU))"
    assert start([sys.executable, "-S", "-c", code], dict(os.environ), log).wait(10) == 0
    assert text(log).split() == [str(os.getsid(0)), "True", str(signal.SIG_IGN)]


def test_last_words_are_the_fatal_error_or_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"event": "starting"}\n{"event": "fatal", "error": "no such model"}\n{"event": "stopped"}\n')
    assert last_words(log) == "no such model"
    log.write_text("Traceback\nboom\n[1]\n")
    assert last_words(log) == "Traceback\nboom\n[1]"
    assert "No such file" in last_words(tmp_path / "none")


def test_a_service_whose_log_cannot_be_written_starts_without(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    process = start([sys.executable, "-S", "-c", "print('up')"], dict(os.environ), tmp_path / "logs" / "worker.log")
    assert process.wait(30) == 0
    process = start([sys.executable, "-S", "-c", "print('up')"], dict(os.environ), tmp_path / "new" / "worker.log")
    assert process.wait(30) == 0
    assert (tmp_path / "new" / "worker.log").read_text() == "up\n"
