"""How commands end from outside: in one line and with a status that tells, at whatever moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.harness import MODEL, ROOT, free_port


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *words]


def pageant(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command(*words), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_refusal_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    done = pageant("serve", "-m", "/nowhere", "--runtime-dir", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.splitlines() == [
        "pageant: model directory '/nowhere' does not exist (`pageant doctor` checks everything)"
    ]


def test_what_only_a_child_finds_ends_with_its_words(tmp_path: Path) -> None:
    """A tokenizer.json is not parsed before the start."""
    model = str(shutil.copytree(MODEL, tmp_path / "model"))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    words = ("-m", model, "--runtime-dir", str(tmp_path / "run"), "--port", "0", "--http-port", "-1")
    done = pageant("serve", *words)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert last.startswith("pageant: ") and "cannot work with this configuration" in last and "tokenizer.json" in last


def test_tcp_makes_its_runtime_directory(tmp_path: Path) -> None:
    """An order desk stands in it before any service has made it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", "-m", str(MODEL), "--transport", "tcp",
         "--runtime-dir", str(tmp_path / "not" / "yet"), "--scheduler-port", str(free_port()), "--port", "0",
         "--http-port", "-1", "--log-dir", str(tmp_path / "logs")],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "not" / "yet" / "serve.sock").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "Traceback" not in said, said


BEGUN = """
import signal
import services.cli.command_line.entry
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs these tests in the background ignores it
print('up', flush=True)  # until then Python starts
services.cli.command_line.entry.run()
"""
MOMENTS = random.Random(14)
INTERRUPTED: dict[str, tuple[str, ...]] = {
    "serve": ("serve", "-m", str(MODEL), "--port", "0", "--http-port", "-1", "--log-level", "error"),
    "quickstart": ("quickstart", "-m", str(MODEL), "--max-tokens", "500"),
    "doctor": ("doctor", "-m", str(MODEL), "--port", "0", "--http-port", "-1"),
    "generate": ("generate", "One day", "--address", "127.0.0.1:1"),
    "chat": ("chat", "--address", "127.0.0.1:1"),
    "top": ("top", "--url", "http://127.0.0.1:1/metrics"),
    "trace": ("trace", "--logs", "-"),
    "bench": ("bench", "serve", "--address", "127.0.0.1:1", "--num-prompts", "3"),
    "simulate": ("simulate", "--num-prompts", "2000"),
    "replay": ("replay", str(ROOT / "tests/unit/scheduler/recording/recordings/decisions.rec"), "--invariants"),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_at_any_moment_shows_no_trace(name: str, tmp_path: Path) -> None:
    for _ in range(3):
        environment = os.environ | {"PAGEANT_RUNTIME_DIR": str(tmp_path / "run")}
        process = subprocess.Popen(
            [sys.executable, "-c", BEGUN, *INTERRUPTED[name]], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        time.sleep(MOMENTS.uniform(0.02, 1.5))
        process.send_signal(signal.SIGINT)
        try:
            said = "".join(process.communicate(timeout=60))
        except subprocess.TimeoutExpired:
            process.kill()  # its services end with it
            process.communicate()
            raise
        assert "Traceback" not in said and "Exception" not in said, said
        assert process.returncode in (0, 1, 130, -signal.SIGINT), said


def test_a_reader_that_leaves_ends_a_command_without_a_word() -> None:
    process = subprocess.Popen(command("serve", "--help"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) in (0, 1)
